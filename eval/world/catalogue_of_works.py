"""Relations of films and of other works, as data; the rest of `catalogue`, apart because one file was too long."""

from __future__ import annotations

from . import words
from .names import Kind
from .relation import Relation

FILM = (
    Relation(
        key="director",
        kind=Kind.FILM,
        target=Kind.PERSON,
        statements=("{S} was directed by {O}", "{S} was shot by {O}", "{P} director was {O}"),
        questions=("Who directed {S}?", "Who shot {S}?", "Who was the director of {S}?"),
        reverse=("What did {O} direct?", "Which film was shot by {O}?"),
        descriptions=("the director of {S}", "the person who directed {S}"),
    ),
    Relation(
        key="studio",
        kind=Kind.FILM,
        target=Kind.FIRM,
        statements=("{S} was financed by {O}", "{S} was released by {O}", "{P} studio was {O}"),
        questions=("Who financed {S}?", "Which firm released {S}?", "What was the studio of {S}?"),
        reverse=("What did {O} finance?", "Which film was released by {O}?"),
        descriptions=("the studio of {S}", "the firm that financed {S}"),
    ),
    Relation(
        key="setting",
        kind=Kind.FILM,
        target=Kind.TOWN,
        statements=("{S} is set in {O}", "{S} takes place in {O}", "{P} setting is {O}"),
        questions=("Where is {S} set?", "Where does {S} take place?", "What is the setting of {S}?"),
        reverse=("Which film is set in {O}?", "Which film takes place in {O}?"),
        descriptions=("the setting of {S}", "the town where {S} is set"),
    ),
    Relation(
        key="awards",
        kind=Kind.FILM,
        values=words.COUNTS,
        statements=("{S} received {O} awards", "{S} took {O} awards", "{P} awards number {O}"),
        questions=("How many awards did {S} receive?", "How many awards did {S} take?", "What is the number of awards of {S}?"),
        reverse=("Which film received {O} awards?", "Which film took {O} awards?"),
        most=("Which film received more awards, {A} or {B}?", "Which film took more awards, {A} or {B}?"),
        least=("Which film received fewer awards, {A} or {B}?", "Which film took fewer awards, {A} or {B}?"),
    ),
    Relation(
        key="premiere",
        kind=Kind.FILM,
        values=words.YEARS,
        statements=("{S} premiered in {O}", "{S} reached cinemas in {O}", "{P} premiere was in {O}"),
        questions=("When did {S} premiere?", "When did {S} reach cinemas?", "When was the premiere of {S}?"),
        reverse=("Which film premiered in {O}?", "Which film reached cinemas in {O}?"),
        most=("Which film premiered later, {A} or {B}?", "Which film is younger, {A} or {B}?"),
        least=("Which film premiered earlier, {A} or {B}?", "Which film is older, {A} or {B}?"),
    ),
)

WORK = (
    Relation(
        key="author",
        kind=Kind.WORK,
        target=Kind.PERSON,
        statements=("{S} was written by {O}", "{S} was composed by {O}", "{P} author was {O}"),
        questions=("Who wrote {S}?", "Who composed {S}?", "Who was the author of {S}?"),
        reverse=("What did {O} write?", "Which work was composed by {O}?"),
        descriptions=("the author of {S}", "the person who wrote {S}"),
    ),
    Relation(
        key="keeper",
        kind=Kind.WORK,
        target=Kind.TOWN,
        statements=("{S} is kept in {O}", "{S} is shown in {O}", "{P} home is {O}"),
        questions=("Where is {S} kept?", "Where is {S} shown?", "What is the home of {S}?"),
        reverse=("Which work is kept in {O}?", "Which work is shown in {O}?"),
        descriptions=("the home of {S}", "the town where {S} is kept"),
    ),
    Relation(
        key="publisher",
        kind=Kind.WORK,
        target=Kind.FIRM,
        statements=("{S} was published by {O}", "{S} was printed by {O}", "{P} publisher was {O}"),
        questions=("Who published {S}?", "Which firm printed {S}?", "What was the publisher of {S}?"),
        reverse=("What did {O} publish?", "Which work was printed by {O}?"),
        descriptions=("the publisher of {S}", "the firm that published {S}"),
    ),
    Relation(
        key="theme",
        kind=Kind.WORK,
        values=words.THEME,
        statements=("{S} is about {O}", "{S} deals with {O}", "{P} theme is {O}"),
        questions=("What is {S} about?", "What does {S} deal with?", "What is the theme of {S}?"),
        reverse=("Which work is about {O}?", "Which work deals with {O}?"),
    ),
    Relation(
        key="chapters",
        kind=Kind.WORK,
        values=words.COUNTS,
        statements=("{S} has {O} chapters", "{S} consists of {O} chapters", "{P} chapters number {O}"),
        questions=(
            "How many chapters does {S} have?",
            "How many chapters does {S} consist of?",
            "What is the number of chapters of {S}?",
        ),
        reverse=("Which work has {O} chapters?", "Which work consists of {O} chapters?"),
        most=("Which work has more chapters, {A} or {B}?", "Which work consists of more chapters, {A} or {B}?"),
        least=("Which work has fewer chapters, {A} or {B}?", "Which work consists of fewer chapters, {A} or {B}?"),
    ),
    Relation(
        key="finished",
        kind=Kind.WORK,
        values=words.YEARS,
        statements=("{S} was finished in {O}", "{S} was completed in {O}", "{P} completion was in {O}"),
        questions=("When was {S} finished?", "When was {S} completed?", "When was the completion of {S}?"),
        reverse=("Which work was finished in {O}?", "Which work was completed in {O}?"),
        most=("Which work was finished later, {A} or {B}?", "Which work is younger, {A} or {B}?"),
        least=("Which work was finished earlier, {A} or {B}?", "Which work is older, {A} or {B}?"),
    ),
)
