"""Test cases: a question, its answer, and a context of gold chunks among chunks of look-alike articles."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from cacheblend.base.errors import ConfigError

from . import scene as scenes
from .article import Style, Told, write_article
from .names import Kind, Relation, Split
from .question import TESTED, Question, QuestionClass, may_join
from .scene import Scene
from .world import RELATIONS, Group, World, make_world


@dataclass(frozen=True, slots=True)
class CaseChunk:
    """A chunk of a case's context.

    Attributes:
        text: the chunk; it ends in a newline.
        document: id of the article that it is of, see `corpus`.
        index: its place in that article.
        is_gold: whether the answer rests on it: it tells an asked fact, or names the subject of one told in a later chunk.
    """

    text: str
    document: str
    index: int
    is_gold: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A question over a context.

    Attributes:
        question: the question alone; `question.prompt_of` adds the cue for the answer.
        answers: the right answers, the first as the world writes it.
        question_class: which of the four classes.
        chunks: the context, chunks of one article in article order.
        candidates: every answer that the question's relation allows in this context: what a guesser chooses from.
    """

    question: str
    answers: tuple[str, ...]
    question_class: QuestionClass
    chunks: tuple[CaseChunk, ...]
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseConfig:
    """Shape of cases.

    Attributes:
        articles: articles of a context; pairs of them for `two_hop`.
        chunk_tokens: least tokens of a chunk; 96 is the reader's stated chunk size.
        classes: the classes, in turn.
    """

    articles: int = 3
    chunk_tokens: int = 96
    classes: tuple[QuestionClass, ...] = TESTED

    def __post_init__(self) -> None:
        if not 2 <= self.articles <= GROUP_SIZE:
            raise ConfigError("articles", self.articles, f"2 to {GROUP_SIZE}, the articles of one group")
        if not self.classes or not set(self.classes) <= set(TESTED):
            raise ConfigError("classes", self.classes, f"one or more of {', '.join(TESTED)}")

    @property
    def style(self) -> Style:
        """How the articles are written."""
        return Style(chunk_tokens=self.chunk_tokens)


GROUP_SIZE = 5
# Names of some kinds run out in a split beyond this many groups of them.
_MOST_GROUPS = 40


def world_of(seed: int, count: int, split: Split = Split.TEST) -> World:
    """The world that `count` cases of a seed are about, with about as many articles as there are cases."""
    groups = min(_MOST_GROUPS, max(2, count // (len(Kind) * GROUP_SIZE)))
    return make_world(str(seed), split, groups, GROUP_SIZE)


def make_cases(seed: int, count: int, split: Split = Split.TEST, config: CaseConfig | None = None) -> tuple[Case, ...]:
    """`count` cases, the classes in turn; the same arguments give the same cases, byte for byte.

    Raises:
        ConfigError: a count below 1.
    """
    if count < 1:
        raise ConfigError("count", count, "at least 1")
    config = config or CaseConfig()
    world = world_of(seed, count, split)
    return tuple(_make_case(world, config.classes[index % len(config.classes)], index, config) for index in range(count))


def _make_case(world: World, wanted: QuestionClass, index: int, config: CaseConfig) -> Case:
    rng = random.Random(f"case/{world.split}/{world.seed}/{index}")
    while True:
        group = rng.choice(world.groups[rng.choice(tuple(Kind))])
        scene = _two_hop_scene(rng, world, group, config) if wanted is QuestionClass.TWO_HOP else None
        scene = scene or scenes.group_scene(rng, world, group, config.articles, config.style)
        pool = [question for question in scene.questions(rng)[wanted] if _is_fair(scene, question, config)]
        if pool:
            return _as_case(scene, rng.choice(pool))


def _two_hop_scene(rng: random.Random, world: World, group: Group, config: CaseConfig) -> Scene:
    first = rng.choice([relation for relation in _relations(group) if relation.target is not None])
    second = rng.choice([relation for relations in RELATIONS.values() for relation in relations if may_join(first, relation)])
    return scenes.linked_scene(rng, world, group, first, second, config.articles, config.style)


def _relations(group: Group) -> Sequence[Relation]:
    return (*group.early, *group.late)


def _is_fair(scene: Scene, question: Question, config: CaseConfig) -> bool:
    """Whether as many different answers as articles stand in the context, so that the relation alone gives little away."""
    candidates = scene.candidates(question)
    least = 2 if question.question_class is QuestionClass.COMPARE else config.articles
    return len(candidates) == len(set(candidates)) >= least


def _as_case(scene: Scene, question: Question) -> Case:
    gold = {place for told in question.gold for place in _gold_places(told)}
    chunks = tuple(
        CaseChunk(
            text=passage.text,
            document=document_id(passage.article.subject.name),
            index=passage.index,
            is_gold=(passage.article.subject.name, passage.index) in gold,
        )
        for passage in scene.passages
    )
    return Case(question.text, (question.answer,), question.question_class, chunks, scene.candidates(question))


def _gold_places(told: Told) -> set[tuple[str, int]]:
    """The chunk that tells a fact and, where that one never names the subject, the first, which does."""
    return {(told.fact.subject.name, index) for index in ({told.chunk} if told.chunk_names else {0, told.chunk})}


def document_id(name: str) -> str:
    """The id of the article about `name`."""
    return name.lower().replace(" ", "-")


def documents(world: World, style: Style | None = None) -> Iterator[dict[str, object]]:
    """Every article of a world as `{"id", "title", "text", "chunks"}`; `text` is its chunks put together."""
    style = style or Style()
    for groups in world.groups.values():
        for group in groups:
            for entity in group.entities:
                article = write_article(world, group, entity, style)
                yield {
                    "id": document_id(entity.name),
                    "title": entity.name,
                    "text": article.text,
                    "chunks": list(article.chunks),
                }


def write_corpus(path: Path, seed: int, articles: int = 210) -> int:
    """Writes a corpus of at least `articles` test-split articles as JSONL; returns how many.

    Raises:
        FileExistsError: the file exists.
    """
    per_round = len(Kind) * GROUP_SIZE
    world = make_world(str(seed), Split.TEST, -(-articles // per_round), GROUP_SIZE)
    lines = [json.dumps(document, ensure_ascii=False) for document in documents(world, CaseConfig().style)]
    with path.open("x", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return len(lines)


def guessing_levels(cases: Iterable[Case]) -> dict[QuestionClass, float]:
    """Mean F1, by class, of a guesser who knows the question's relation but not its subject.

    The guesser picks evenly among the values that the context gives for that relation (of `compare`, among the two names);
    names that share a word give part of a mark, so the level lies a little above one over the number of articles.
    """
    levels: dict[QuestionClass, list[float]] = defaultdict(list)
    for case in cases:
        level = fmean(max(_f1(candidate, answer) for answer in case.answers) for candidate in case.candidates)
        levels[case.question_class].append(level)
    return {each: fmean(values) for each, values in levels.items()}


def _f1(said: str, wanted: str) -> float:
    """Token F1 of two answers of the world, which need no normalising."""
    common = sum((Counter(said.lower().split()) & Counter(wanted.lower().split())).values())
    return 2 * common / (len(said.split()) + len(wanted.split()))
