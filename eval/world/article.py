"""Writing an entity's article: chunks of plain English whose later sentences refer back to the first."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.retriever.config import SEPARATOR

from . import wording
from .names import Split
from .world import Entity, Fact, Group, World

# A token of the closed world, for counting without a tokenizer: a word, a mark, a line's end.
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How articles are written; the defaults are the test's, a curriculum passes easier ones.

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
    role = rng.choice(wording.ROLES[entity.kind])
    return rng.choice(wording.INTRODUCTIONS).format(S=entity.name, role=role) + "."


def _statement(rng: random.Random, split: Split, fact: Fact, style: Style, *, is_early: bool) -> tuple[str, bool]:
    """A sentence that tells `fact`, and whether it names the subject."""
    statements = fact.relation.statements
    opener, index = wording.pick(rng, split, len(wording.OPENERS), len(statements), 5, style.plain)
    form = wording.stand_in(rng, fact.subject.kind, fact.subject.pronoun)
    is_named = rng.random() < (style.named_early if is_early else style.named_late)
    if is_named:
        form = wording.named(fact.subject.name)
    elif rng.random() < style.restated and "{S}" in statements[index]:
        form, is_named = wording.SubjectForm(f"{form.plain}, {fact.subject.name},", form.possessive), True
    body = statements[index].format(S=form.plain, P=form.possessive, O=fact.value)
    tail = "" if rng.random() < style.plain else rng.choice(wording.TAILS)
    return wording.with_opener(wording.OPENERS[opener], body) + tail + ".", is_named


def _fill(rng: random.Random, sentences: list[str], least_tokens: int, protect: int) -> str:
    """The sentences with idle ones put among them, none before the first `protect`, until there are enough tokens."""
    fillers = rng.sample(wording.FILLERS, len(wording.FILLERS))
    sentences = list(sentences)
    while count_tokens(" ".join(sentences) + SEPARATOR) < least_tokens and fillers:
        sentences.insert(rng.randint(protect, len(sentences)), fillers.pop() + ".")
    return " ".join(sentences) + SEPARATOR
