"""What a guesser would get: the level that a reader's F1 is to be compared with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean

from .case import Case
from .question import QuestionClass


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
