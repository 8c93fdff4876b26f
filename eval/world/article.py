"""Writing an entity's article: chunks of plain English whose later sentences refer back to the first."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.retriever.config import SEPARATOR

from .names import HE, SHE, Kind, Split
from .world import Entity, Fact, Group, World

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
    """Words for the subject in one sentence, plain and possessive."""

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
    """The sentence after an opener; its own first word loses its capital unless it is a name."""
    return capitalised(opener + sentence) if opener else capitalised(sentence)


# A token of the closed world, for counting without a tokenizer: a word, a mark, a line's end.
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Manner of writing articles; the defaults are the test's, a curriculum passes easier ones.

    Attributes:
        chunks: chunks of an article; the first names the subject.
        chunk_tokens: a chunk is filled up with idle sentences to at least this many tokens.
        facts: at most this many facts a chunk; None for all.
        named_early: share of the first chunk's facts that name their subject.
        named_late: the same for later chunks; above 0 in lessons only.
        restated: share of later facts that refer back and name at once ("she, Mara Quill, ..."); above 0 in lessons only.
        plain: share of facts without an opener, and of facts without a tail.
    """

    chunks: int = 2
    chunk_tokens: int = 64
    facts: int | None = None
    named_early: float = 0.7
    named_late: float = 0.0
    restated: float = 0.0
    plain: float = 0.5


@dataclass(frozen=True, slots=True)
class Told:
    """A fact as an article tells it: in which chunk, and how far away its subject's name is."""

    fact: Fact
    chunk: int
    sentence_names: bool
    chunk_names: bool


@dataclass(frozen=True, slots=True)
class Article:
    """An entity's article as chunk texts, each ending in the retriever's separator, and what they tell."""

    subject: Entity
    chunks: tuple[str, ...]
    told: tuple[Told, ...]

    @property
    def text(self) -> str:
        """The whole article."""
        return "".join(self.chunks)


def count_tokens(text: str) -> int:
    """Tokens of a text of this world, as the reader's tokenizer counts them."""
    return len(_TOKEN.findall(text))


def write_article(world: World, group: Group, entity: Entity, style: Style) -> Article:
    """The article of `entity`; the same arguments give the same text."""
    rng = random.Random(f"article/{world.split}/{world.seed}/{entity.name}")
    by_relation = {fact.relation.key: fact for fact in world.facts[entity.name]}
    early = [by_relation[relation.key] for relation in group.early]
    late = [by_relation[relation.key] for relation in group.late]
    parts = [early + late] if style.chunks == 1 else [early, *_deal(late, style.chunks - 1)]
    chunks: list[str] = []
    told: list[Told] = []
    for index, facts in enumerate(parts):
        facts = rng.sample(facts[: style.facts], len(facts[: style.facts]))
        sentences = [_introduction(rng, entity)] if index == 0 else []
        names = [False] * len(facts)
        for place, fact in enumerate(facts):
            sentence, names[place] = _statement(rng, world.split, fact, style, is_early=index == 0)
            sentences.append(sentence)
        chunks.append(_fill(rng, sentences, style.chunk_tokens, protect=int(index == 0)))
        chunk_names = entity.name in chunks[-1]
        told += [Told(fact, index, name, chunk_names) for fact, name in zip(facts, names, strict=True)]
    return Article(entity, tuple(chunks), tuple(told))


def _deal(facts: Sequence[Fact], chunks: int) -> list[list[Fact]]:
    return [list(facts[start::chunks]) for start in range(chunks)]


def _introduction(rng: random.Random, entity: Entity) -> str:
    role = rng.choice(ROLES[entity.kind])
    return rng.choice(INTRODUCTIONS).format(S=entity.name, role=role) + "."


def _statement(rng: random.Random, split: Split, fact: Fact, style: Style, *, is_early: bool) -> tuple[str, bool]:
    """A sentence that tells `fact`, and whether it names the subject."""
    statements = fact.relation.statements
    opener, index = pick(rng, split, len(OPENERS), len(statements), 5, style.plain)
    form = stand_in(rng, fact.subject.kind, fact.subject.pronoun)
    is_named = rng.random() < (style.named_early if is_early else style.named_late)
    if is_named:
        form = named(fact.subject.name)
    elif rng.random() < style.restated and "{S}" in statements[index]:
        form, is_named = SubjectForm(f"{form.plain}, {fact.subject.name},", form.possessive), True
    body = statements[index].format(S=form.plain, P=form.possessive, O=fact.value)
    tail = "" if rng.random() < style.plain else rng.choice(TAILS)
    return with_opener(OPENERS[opener], body) + tail + ".", is_named


def _fill(rng: random.Random, sentences: list[str], least_tokens: int, protect: int) -> str:
    """The sentences with idle ones put among them, none before the first `protect`, until there are enough tokens."""
    fillers = rng.sample(FILLERS, len(FILLERS))
    sentences = list(sentences)
    while count_tokens(" ".join(sentences) + SEPARATOR) < least_tokens and fillers:
        sentences.insert(rng.randint(protect, len(sentences)), fillers.pop() + ".")
    return " ".join(sentences) + SEPARATOR
