"""How a sentence or a question is dressed, and which dresses are held out of training.

A statement is an opener, one of its relation's wordings and a tail. Opener `i` with wording `j` is held out of training when
`(i + j) mod 5 == 4`, a question's when `(i + j) mod 4 == 3`: the test wears combinations that training never showed, of words
that it did.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .names import HE, SHE, Kind, Split

OPENERS = (
    "",
    "by all accounts ",
    "as most people know, ",
    "it is often said that ",
    "friends and rivals agree that ",
)
TAILS = (
    "",
    ", as the papers reported at the time",
    ", which few visitors expect",
    ", a detail that every guide repeats",
    ", and nobody seems to mind",
)
QUESTION_OPENERS = ("", "tell me, ", "according to the articles, ")
INTRODUCTIONS = ("{S} is {role}", "The subject here is {S}, {role}", "This entry is about {S}, {role}")

ROLES: dict[Kind, tuple[str, ...]] = {
    Kind.PERSON: ("a painter", "a lawyer", "a surgeon", "a baker", "a pilot", "an engineer", "a poet", "a farmer", "a judge"),
    Kind.FIRM: ("a family firm", "a young company", "a large manufacturer", "a trading house"),
    Kind.TOWN: ("a market town", "a quiet town", "a border town", "a walled town"),
    Kind.CLUB: ("a football club", "a club of amateurs", "a proud club", "a small club"),
    Kind.FILM: ("a film", "a silent film", "a popular film", "a long film"),
    Kind.WORK: ("a novel", "a play", "a long poem", "a cycle of songs"),
}
STAND_INS: dict[Kind, tuple[tuple[str, str], ...]] = {
    Kind.FIRM: (("it", "its"), ("the firm", "the firm's"), ("the company", "its")),
    Kind.TOWN: (("it", "its"), ("the town", "the town's"), ("the place", "its")),
    Kind.CLUB: (("it", "its"), ("the club", "the club's"), ("the side", "its")),
    Kind.FILM: (("it", "its"), ("the film", "the film's"), ("the picture", "its")),
    Kind.WORK: (("it", "its"), ("the work", "the work's"), ("the piece", "its")),
}
FILLERS = (
    "Not much more is known about the early days",
    "The rest of the story is told in older books",
    "Several letters from that time were never opened",
    "In those years the winters were long and the roads were poor",
    "A small museum keeps a few photographs and a broken chair",
    "Opinions on this have changed more than once",
    "The archive has two pages on the matter and both are torn",
    "Every autumn a few students come to ask about it",
    "There was a fire in the records office and many papers were lost",
    "People still argue about what happened next",
    "A short speech is given on the first day of spring",
    "The weather on that day was mild with some rain in the evening",
)


@dataclass(frozen=True, slots=True)
class SubjectForm:
    """What stands for the subject in one sentence, plain and possessive."""

    plain: str
    possessive: str


def named(name: str) -> SubjectForm:
    """The subject by its name."""
    return SubjectForm(name, f"{name}'s")


def stand_in(rng: random.Random, kind: Kind, pronoun: str) -> SubjectForm:
    """The subject by pronoun or definite description: "she", "the firm"."""
    if pronoun == SHE:
        return SubjectForm("she", "her")
    if pronoun == HE:
        return SubjectForm("he", "his")
    return SubjectForm(*rng.choice(STAND_INS[kind]))


def is_held_out(opener: int, wording: int, period: int) -> bool:
    """Whether training never shows this opener before this wording."""
    return (opener + wording) % period == period - 1


def pick(rng: random.Random, split: Split, openers: int, wordings: int, period: int, plain: float) -> tuple[int, int]:
    """Indices of an opener and a wording that `split` may use; with probability `plain` no opener."""
    while True:
        opener = 0 if rng.random() < plain else rng.randrange(openers)
        wording = rng.randrange(wordings)
        if split is not Split.TRAIN or not is_held_out(opener, wording, period):
            return opener, wording


def capitalised(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[0].upper() + sentence[1:]


def with_opener(opener: str, sentence: str) -> str:
    """The sentence behind an opener; its own first word loses its capital unless it is a name."""
    return capitalised(opener + sentence) if opener else capitalised(sentence)
