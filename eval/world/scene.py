"""A scene: the articles that stand in one context, and every question that can be asked about them."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from . import question
from .article import Article, Style, Told, write_article
from .names import Relation, Split
from .question import Question, QuestionClass
from .world import Entity, Group, World


@dataclass(frozen=True, slots=True)
class Passage:
    """One chunk of one article, in the order in which a context shows them."""

    article: Article
    index: int

    @property
    def text(self) -> str:
        """The chunk's text."""
        return self.article.chunks[self.index]


@dataclass(frozen=True, slots=True)
class Scene:
    """Passages in context order, and the facts that they tell."""

    split: Split
    passages: tuple[Passage, ...]
    told: tuple[Told, ...]

    def questions(self, rng: random.Random, plain: float = question.PLAIN) -> Mapping[QuestionClass, list[Question]]:
        """Every question of every class, each fact asked once in either direction, a share `plain` without an opener."""
        found: dict[QuestionClass, list[Question]] = {each: [] for each in QuestionClass}
        for told in self.told:
            found[question.class_of(told)].append(question.forward(rng, self.split, told, plain))
            found[QuestionClass.CLOZE].append(question.cloze(rng, told))
            if told.fact.relation.descriptions:
                found[QuestionClass.BRIDGE].append(question.bridge(rng, told))
            if told.fact.relation.is_number:
                found[QuestionClass.ORDER].append(question.order(rng, self.split, told, plain))
            found[QuestionClass.REVERSE].append(question.reverse(rng, self.split, told, plain))
        by_subject: dict[str, list[Told]] = {}
        for told in self.told:
            by_subject.setdefault(told.fact.subject.name, []).append(told)
        for first in self.told:
            for second in by_subject.get(first.fact.value, []) if first.fact.target else []:
                found[QuestionClass.TWO_HOP].append(question.two_hop(rng, self.split, first, second, plain))
        for one, other in combinations(self.told, 2):
            if one.fact.relation is other.fact.relation and one.fact.relation.is_number:
                found[QuestionClass.COMPARE].append(question.compare(rng, self.split, one, other, plain))
        return found

    def candidates(self, asked: Question) -> tuple[str, ...]:
        """Every answer that the question's last relation allows in this scene: what a guesser chooses from."""
        if asked.question_class is QuestionClass.COMPARE:
            return tuple(told.fact.subject.name for told in asked.gold)
        if asked.question_class is QuestionClass.ORDER:
            return tuple(re.findall(r"\d+", asked.text))
        relation = asked.gold[-1].fact.relation
        rivals = [told.fact for told in self.told if told.fact.relation is relation]
        return tuple(f.subject.name if asked.question_class is QuestionClass.REVERSE else f.value for f in rivals)


def group_scene(rng: random.Random, world: World, group: Group, articles: int, style: Style) -> Scene:
    """A scene of `articles` whole articles of one group, in random order."""
    entities = rng.sample(group.entities, articles)
    return _scene(world, [_whole(write_article(world, group, entity, style)) for entity in entities])


def linked_scene(
    rng: random.Random, world: World, group: Group, first: Relation, second: Relation | None, pairs: int, style: Style
) -> Scene:
    """A scene of `pairs` subjects of a group and the entities that `first` leads them to, in random order.

    Of each article the passages that tell the asked relation stand in the scene, with the one that names its subject; all of
    them where `second` is None.
    """
    parts: list[list[Passage]] = []
    for entity in rng.sample(group.entities, pairs):
        target = next(f.target for f in world.facts[entity.name] if f.relation is first)
        assert target is not None
        target_group = group_of(world, target)
        for subject, home, asked in ((entity, group, first), (target, target_group, second)):
            article = write_article(world, home, subject, style)
            parts.append(_whole(article) if second is None else _telling(article, asked))
    rng.shuffle(parts)
    return _scene(world, parts)


def group_of(world: World, entity: Entity) -> Group:
    """The group that an entity belongs to."""
    return next(group for group in world.groups[entity.kind] if entity in group.entities)


def _whole(article: Article) -> list[Passage]:
    return [Passage(article, index) for index in range(len(article.chunks))]


def _telling(article: Article, relation: Relation | None) -> list[Passage]:
    last = next(told.chunk for told in article.told if told.fact.relation is relation)
    return [Passage(article, index) for index in sorted({0, last})]


def _scene(world: World, parts: Sequence[list[Passage]]) -> Scene:
    passages = tuple(passage for part in parts for passage in part)
    shown = {(passage.article.subject.name, passage.index) for passage in passages}
    articles = {part[0].article.subject.name: part[0].article for part in parts}
    told = tuple(t for article in articles.values() for t in article.told if (t.fact.subject.name, t.chunk) in shown)
    return Scene(world.split, passages, told)
