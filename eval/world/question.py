"""Questions about told facts, and the class that each belongs to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from cacheblend.service.engine.prompt import AFTER_QUESTION, BEFORE_QUESTION

from . import article
from .article import Told
from .names import Relation, Split


class QuestionClass(StrEnum):
    """Steps that a question takes; the first four are the test's, the others are in lessons only.

    INSIDE: one sentence of one chunk names the subject and tells the fact.
    ACROSS: the fact stands in a chunk that never names its subject; the name is in an earlier chunk.
    TWO_HOP: two articles.
    COMPARE: two articles' numbers.
    NEAR: the sentence refers back, but the chunk names the subject.
    REVERSE: the value is given, the subject asked.
    CLOZE: the fact's own wording with the subject's name, broken off before the value.
    BRIDGE: a description to resolve, "the firm that employs Mara Quill": the first half of a two-hop question.
    ORDER: a comparison of two numbers that the question itself gives.
    RECALL: no article at all, a pair of words to be completed.
    """

    INSIDE = "inside"
    ACROSS = "across"
    TWO_HOP = "two_hop"
    COMPARE = "compare"
    NEAR = "near"
    REVERSE = "reverse"
    CLOZE = "cloze"
    BRIDGE = "bridge"
    ORDER = "order"
    RECALL = "recall"


# Share of questions without an opener.
PLAIN = 0.6
# Stands between a question's working and its answer, and nowhere in an answer.
WORKING_ENDS = ": "

TESTED = (QuestionClass.INSIDE, QuestionClass.ACROSS, QuestionClass.TWO_HOP, QuestionClass.COMPARE)
_WITHOUT_CUE = frozenset({QuestionClass.CLOZE, QuestionClass.BRIDGE, QuestionClass.RECALL})


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its one answer, and the told facts that it rests on (its gold).

    `working` is what the reader looks up on the way to the answer, and writes before it: the firm that a two-hop question
    describes, the numbers that a comparison compares. A reader of a few layers learns each step, and not both at once.
    """

    text: str
    answer: str
    question_class: QuestionClass
    gold: tuple[Told, ...]
    working: str = ""

    @property
    def prompt(self) -> str:
        """What follows the context; some classes go on without a cue."""
        return self.text if self.question_class in _WITHOUT_CUE else prompt_of(self.text)

    @property
    def written(self) -> str:
        """What the reader learns to write: the working, if any, and the answer."""
        return self.working + WORKING_ENDS + self.answer if self.working else self.answer


def prompt_of(question: str) -> str:
    """What follows the chunks in a prompt: the engine's own words around the question."""
    return BEFORE_QUESTION + question + AFTER_QUESTION


def class_of(told: Told) -> QuestionClass:
    """The class of a question that asks for one told fact's value."""
    if told.sentence_names:
        return QuestionClass.INSIDE
    return QuestionClass.NEAR if told.chunk_names else QuestionClass.ACROSS


def forward(rng: random.Random, split: Split, told: Told, plain: float = PLAIN) -> Question:
    """Asks for the value: "Who does Mara Quill work for?"."""
    text = _worded(rng, split, told.fact.relation.questions, plain).format(S=told.fact.subject.name)
    return Question(text, told.fact.value, class_of(told), (told,))


def reverse(rng: random.Random, split: Split, told: Told, plain: float = PLAIN) -> Question:
    """Asks for the subject: "Who works for Orin Labs?"."""
    text = _worded(rng, split, told.fact.relation.reverse, plain).format(O=told.fact.value)
    return Question(text, told.fact.subject.name, QuestionClass.REVERSE, (told,))


def cloze(rng: random.Random, told: Told) -> Question:
    """A statement to complete: "Mara Quill works for". Nearly plain induction, so it is learnt first and the others on it."""
    name = told.fact.subject.name
    begun = rng.choice(told.fact.relation.statements).partition("{O}")[0].rstrip()
    return Question(begun.format(S=name, P=f"{name}'s"), told.fact.value, QuestionClass.CLOZE, (told,))


def two_hop(rng: random.Random, split: Split, first: Told, second: Told, plain: float = PLAIN) -> Question:
    """Asks for a fact about the value of another: "Where is the firm that employs Mara Quill based?"."""
    bridge = rng.choice(first.fact.relation.descriptions).format(S=first.fact.subject.name)
    text = _worded(rng, split, second.fact.relation.questions, plain).format(S=bridge)
    return Question(text, second.fact.value, QuestionClass.TWO_HOP, (first, second), first.fact.value)


def compare(rng: random.Random, split: Split, one: Told, other: Told, plain: float = PLAIN) -> Question:
    """Asks which subject has the greater or smaller number: "Who has won more prizes, Mara Quill or Dav Orrin?"."""
    relation = one.fact.relation
    is_most = rng.random() < 0.5
    text = _worded(rng, split, relation.most if is_most else relation.least, plain)
    one_wins = (int(one.fact.value) > int(other.fact.value)) is is_most
    first, second = (one, other) if rng.random() < 0.5 else (other, one)
    winner = one if one_wins else other
    text = text.format(A=first.fact.subject.name, B=second.fact.subject.name)
    working = f"{first.fact.value}, {second.fact.value}"
    return Question(text, winner.fact.subject.name, QuestionClass.COMPARE, (one, other), working)


def bridge(rng: random.Random, told: Told) -> Question:
    """A description, to go on with what it describes."""
    text = rng.choice(told.fact.relation.descriptions).format(S=told.fact.subject.name)
    return Question(text, told.fact.value, QuestionClass.BRIDGE, (told,))


def order(rng: random.Random, split: Split, told: Told, plain: float = PLAIN) -> Question:
    """A comparison in a relation's own words, with two of its numbers where names would stand."""
    relation = told.fact.relation
    is_most = rng.random() < 0.5
    first, second = rng.sample(relation.values, 2)
    text = _worded(rng, split, relation.most if is_most else relation.least, plain).format(A=first, B=second)
    return Question(text, (max if is_most else min)(first, second, key=int), QuestionClass.ORDER, (told,))


def may_join(first: Relation, second: Relation) -> bool:
    """Whether a question of two hops can go over `first` to `second`."""
    return first.target is second.kind


def _worded(rng: random.Random, split: Split, wordings: tuple[str, ...], plain: float) -> str:
    opener, index = article.pick(rng, split, len(article.QUESTION_OPENERS), len(wordings), 4, plain)
    text = wordings[index]
    if opener:
        text = text[0].lower() + text[1:]
    return article.with_opener(article.QUESTION_OPENERS[opener], text)
