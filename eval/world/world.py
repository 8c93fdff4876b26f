"""One fictional world: its entities in groups of look-alikes, and every fact about them.

A group is the unit that questions are hard within: its entities are of one kind and one pronoun, say the same relations in
the same chunks, and no two of them share a value. So a question's relation alone never gives its answer away.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from . import catalogue
from .names import HE, IT, SHE, Kind, Namer, Relation, Split

RELATIONS: Mapping[Kind, tuple[Relation, ...]] = {
    Kind.PERSON: catalogue.PERSON,
    Kind.FIRM: catalogue.FIRM,
    Kind.TOWN: catalogue.TOWN,
    Kind.CLUB: catalogue.CLUB,
    Kind.FILM: catalogue.FILM,
    Kind.WORK: catalogue.WORK,
}

# Numbers of one group are at least this far apart, so that "more" and "older" have one clear answer.
NUMBER_GAP = 3


@dataclass(frozen=True, slots=True)
class Entity:
    """Something that an article can be about."""

    kind: Kind
    name: str
    pronoun: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One relation of one subject; `target` is the value's entity where it has an article of its own."""

    subject: Entity
    relation: Relation
    value: str
    target: Entity | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Look-alikes: entities of one kind and pronoun whose articles say the same relations in the same chunks.

    Attributes:
        early: the relations told in an article's first chunk.
        late: those told in the chunks after it.
    """

    entities: tuple[Entity, ...]
    early: tuple[Relation, ...]
    late: tuple[Relation, ...]


@dataclass(frozen=True, slots=True)
class World:
    """All groups of one seed, by kind, and the facts of each entity in the order of its group's relations."""

    seed: str
    split: Split
    groups: Mapping[Kind, tuple[Group, ...]]
    facts: Mapping[str, tuple[Fact, ...]]

    @property
    def entities(self) -> tuple[Entity, ...]:
        """Every entity, group by group."""
        return tuple(entity for groups in self.groups.values() for group in groups for entity in group.entities)


def make_world(seed: str, split: Split, groups: int = 1, size: int = 4) -> World:
    """The world of a seed: for each kind `groups` groups of `size` entities. The same arguments give the same world.

    Args:
        seed: any text; worlds of different splits share no name whatever their seeds (`names`).
        split: whose names to use.
        groups: groups of each kind.
        size: entities of a group, at most 15 (no two share a value, and there are 16 colours).
    """
    rng = random.Random(f"world/{split}/{seed}")
    namer = Namer(rng, split)
    drawn = {kind: tuple(_draw_group(rng, namer, kind, size) for _ in range(groups)) for kind in Kind}
    facts: dict[str, list[Fact]] = {}
    for kind in Kind:
        for group in drawn[kind]:
            for relation in (*group.early, *group.late):
                for fact in _draw_facts(rng, group, relation, drawn):
                    facts.setdefault(fact.subject.name, []).append(fact)
    return World(seed, split, drawn, {name: tuple(told) for name, told in facts.items()})


def _draw_group(rng: random.Random, namer: Namer, kind: Kind, size: int) -> Group:
    pronoun = rng.choice((SHE, HE)) if kind is Kind.PERSON else IT
    entities = tuple(Entity(kind, namer.draw(kind, pronoun), pronoun) for _ in range(size))
    order = rng.sample(RELATIONS[kind], len(RELATIONS[kind]))
    half = len(order) // 2
    return Group(entities, tuple(order[:half]), tuple(order[half:]))


def _draw_facts(rng: random.Random, group: Group, relation: Relation, drawn: Mapping[Kind, tuple[Group, ...]]) -> list[Fact]:
    size = len(group.entities)
    if relation.target is not None:
        targets = rng.sample(rng.choice(drawn[relation.target]).entities, size)
        return [Fact(entity, relation, to.name, to) for entity, to in zip(group.entities, targets, strict=True)]
    values = relation.values[rng.randrange(NUMBER_GAP) :: NUMBER_GAP] if relation.is_number else relation.values
    return [Fact(entity, relation, value) for entity, value in zip(group.entities, rng.sample(values, size), strict=True)]
