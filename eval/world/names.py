"""Names of the world's entities, and the rule that keeps the names of training, validation and test apart.

A name is two parts `i` and `j` of two lists. Its split is a function of `(i + j) mod 10` alone: 0-7 training, 8 validation,
9 test. So no name, and with it no fact about a named subject, is in two splits, whatever the seeds; and every part is seen in
training, because each `i` meets a training `j`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from . import words


class Split(StrEnum):
    """A part of all names; `TRAIN` alone is seen by the reader."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


class Kind(StrEnum):
    """What an article is about."""

    PERSON = "person"
    FIRM = "firm"
    TOWN = "town"
    CLUB = "club"
    FILM = "film"
    WORK = "work"


RESIDUES = {Split.TRAIN: frozenset(range(8)), Split.VALIDATION: frozenset({8}), Split.TEST: frozenset({9})}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """How the names of one kind are composed: a front word, a joint and a back word."""

    fronts: tuple[str, ...]
    backs: tuple[str, ...]
    joint: str = " "

    def name(self, front: int, back: int) -> str:
        """The name of two part indices."""
        return self.fronts[front] + self.joint + self.backs[back]


HE = "he"
SHE = "she"
IT = "it"

PATTERNS: dict[tuple[Kind, str], NamePattern] = {
    (Kind.PERSON, SHE): NamePattern(words.GIVEN_SHE, words.FAMILY),
    (Kind.PERSON, HE): NamePattern(words.GIVEN_HE, words.FAMILY),
    (Kind.FIRM, IT): NamePattern(words.FIRM_ROOT, words.FIRM_NOUN),
    (Kind.TOWN, IT): NamePattern(words.TOWN_FRONT, words.TOWN_ROOT),
    (Kind.CLUB, IT): NamePattern(words.CLUB_ROOT, words.CLUB_NOUN),
    (Kind.FILM, IT): NamePattern(words.TITLE_FRONT, words.TITLE_NOUN),
    (Kind.WORK, IT): NamePattern(words.WORK_FRONT, words.TITLE_NOUN, joint=" of "),
}


def split_of(front: int, back: int) -> Split:
    """The only split that the name of these part indices belongs to."""
    residue = (front + back) % 10
    return next(split for split, residues in RESIDUES.items() if residue in residues)


class Namer:
    """Draws the names of one world: all of one split, no name twice, parts shared as rarely as can be."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng, self._split = rng, split
        self._used: set[str] = set()

    def draw(self, kind: Kind, pronoun: str) -> str:
        """A fresh name; name parts repeat only after 200 draws found no unused pair."""
        pattern = PATTERNS[kind, pronoun]
        for attempt in range(10_000):
            front, back = self._rng.randrange(len(pattern.fronts)), self._rng.randrange(len(pattern.backs))
            name, parts = pattern.name(front, back), {pattern.fronts[front], pattern.backs[back]}
            if split_of(front, back) is not self._split or name in self._used or (attempt < 200 and parts & self._used):
                continue
            self._used |= parts | {name}
            return name
        raise AssertionError(f"no unused {kind} name is left in split {self._split}")
