"""Answers compared as SQuAD does: lower case, no punctuation, no articles, single spaces."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """The form in which answers are compared, as in SQuAD's evaluation script."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Word F1 against the best of the answers, 0..1."""
    return _best(_f1, prediction, answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction is one of the answers, else 0."""
    return _best(lambda said, wanted: float(normalize(said) == normalize(wanted)), prediction, answers)


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    return max(score(prediction, answer) for answer in answers)


def _f1(prediction: str, answer: str) -> float:
    said, wanted = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(said) & Counter(wanted)).values())
    # Two empty texts score 0, as in the script of SQuAD 1.1.
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
