"""Names of the world's entities, and the rule that keeps the names of training, validation and test apart.

A name is two parts `i` and `j` of two lists. Its split is a function of `(i + j) mod 10` alone: 0-7 training, 8 validation,
9 test. So no name, and with it no fact about a named subject, is in two splits, whatever the seeds; and every part is seen in
training, because each `i` meets a training `j`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _compose(starts: str, ends: str) -> tuple[str, ...]:
    return tuple(start + end for start in starts.split() for end in ends.split())


_GIVEN = "Mar El Sel Tal Or Vel Lin Ros Bri Cal Dor Fen Gil Hes Is Jun Kes Nor Pel Wil"
GIVEN_SHE = _compose(_GIVEN, "a ia ena ara ise elle ine etta ova wyn")
GIVEN_HE = _compose(_GIVEN, "an or ek us on ard imir ik eth olt")
FAMILY = _compose(
    "Quil Har Bram Thorn Wex Lund Mor Pren Ash Bel Crev Dun Eck Fal Grim Hol "
    "Ing Jar Kel Lam Mund Nax Osk Pim Rath Sted Tarn Ulv Vost Wynd Yar Zell",
    "ley er by man sen ow ick ard ens ing et ald ane oft une ish",
)

TOWN_FRONT = _words(
    "Port Old New Upper Lower East West North South Great Little Saint Fort Mount Lake Castle Bishop King Long High "
    "Stone White Black Cold"
)
TOWN_ROOT = _compose(
    "Aver Bar Cran Dal Ember Frost Gar Heath Ivel Kirk Lang Mil Nether Oak Pen Raven Shel Tan Under Vint Wal Yarn Zan Brook",
    "ford mere wick holm dale haven stead bury",
)
FIRM_ROOT = _compose(
    "Orin Tel Vant Sol Quor Lex Mir Nov Pyr Rad Syn Trel Umb Ver Xan Zeph Ard Bex Cor Dyn Elt Fluv Gant Hyd",
    "ex ano ium ara ica eon ux ella",
)
FIRM_NOUN = _words(
    "Labs Works Mills Motors Foods Glass Steel Press Lines Partners Brothers Textiles Chemicals Shipping Optics "
    "Mining Timber Tools Energy Systems Trading Paper Ceramics Foundry"
)
CLUB_ROOT = _compose(
    "Pike Stag Otter Falcon Lynx Badger Heron Viper Condor Marten Bison Walrus Kestrel Jackal Mantis Osprey Puma Raccoon "
    "Salmon Tiger Urchin Vulture Weasel Zebra",
    "hill gate side brook",
)
CLUB_NOUN = _words(
    "Rovers United Rangers Athletic Wanderers Albion County Harriers Comets Royals Dynamos Pilots Miners Sailors "
    "Rockets Giants Saints Pirates Archers Knights Hornets Lancers Monarchs Scouts"
)
TITLE_FRONT = _words(
    "Silent Burning Broken Golden Hidden Distant Frozen Crimson Hollow Gentle Savage Secret Silver Velvet Wandering "
    "Weary Bitter Bright Crooked Faded Fearless Forgotten Humble Iron Lonely Lost Midnight Patient Quiet Restless "
    "Rising Sacred Scarlet Shattered Sleeping Solemn Stolen Stormy Stubborn Sunken Tender Thirsty Tired Twisted "
    "Unseen Vanished Vivid Wicked"
)
TITLE_NOUN = _words(
    "Harbor Garden Mirror River Winter Orchard Lantern Letter Mountain Kingdom Bridge Clock Crown Desert Door Echo "
    "Engine Feather Forest Fountain Ghost Hunter Island Journey Ladder Lighthouse Meadow Moon Morning Ocean Palace "
    "Promise Shadow Shore Signal Soldier Song Stranger Summer Thunder Tower Traveler Valley Voyage Widow Window "
    "Witness Wolf"
)
WORK_FRONT = _words(
    "Portrait Study Legend Ballad Hymn Dream Dance Tale Map Memory Vision Lament Elegy Rhapsody Chronicle Fable "
    "Sonata Sketch Riddle Prayer Story Vigil Feast Parade"
)

INSTRUMENT = _words("cello flute harp violin trumpet piano oboe banjo organ lute clarinet guitar drum viola tuba zither")
GOODS = _words("clocks carpets lenses boots candles bicycles cheese rope pianos tiles umbrellas kettles maps paint soap gloves")
COLOUR = _words("red blue green yellow purple orange black white brown gray pink gold silver crimson teal maroon")
RIVER = _compose("Ald Brin Carr Drav Elm Isk Lorn Meth", "a en ow us")
THEME = _words("war love hunger exile music justice grief childhood hope revenge faith friendship travel silence greed courage")
YEARS = tuple(str(year) for year in range(1900, 2000))
COUNTS = tuple(str(count) for count in range(2, 62))


class Split(StrEnum):
    """A part of all names; `TRAIN` alone is seen by the reader."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


class Kind(StrEnum):
    """Kind of thing that an article is about."""

    PERSON = "person"
    FIRM = "firm"
    TOWN = "town"
    CLUB = "club"
    FILM = "film"
    WORK = "work"


RESIDUES = {Split.TRAIN: frozenset(range(8)), Split.VALIDATION: frozenset({8}), Split.TEST: frozenset({9})}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Composition of the names of one kind: a front word, a joint and a back word."""

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
    (Kind.PERSON, SHE): NamePattern(GIVEN_SHE, FAMILY),
    (Kind.PERSON, HE): NamePattern(GIVEN_HE, FAMILY),
    (Kind.FIRM, IT): NamePattern(FIRM_ROOT, FIRM_NOUN),
    (Kind.TOWN, IT): NamePattern(TOWN_FRONT, TOWN_ROOT),
    (Kind.CLUB, IT): NamePattern(CLUB_ROOT, CLUB_NOUN),
    (Kind.FILM, IT): NamePattern(TITLE_FRONT, TITLE_NOUN),
    (Kind.WORK, IT): NamePattern(WORK_FRONT, TITLE_NOUN, joint=" of "),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A relation between a subject of one kind and a value.

    `{S}` stands for the subject, `{P}` for its possessive, `{O}` for the value. A value is the name of an entity of kind
    `target` (another article's subject), or one of `values`.

    Attributes:
        statements: wordings of the fact as a sentence.
        questions: wordings that ask for the value.
        reverse: wordings that ask for the subject.
        descriptions: noun phrases that stand for the value without naming it, for questions of two hops.
        most, least: wordings that ask which of `{A}` and `{B}` has the greater or the smaller value; numbers only.
    """

    key: str
    kind: Kind
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reverse: tuple[str, ...]
    target: Kind | None = None
    values: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    least: tuple[str, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether two values can be compared."""
        return bool(self.most)
