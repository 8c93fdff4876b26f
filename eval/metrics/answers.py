"""Scores of answers, by what their examples ask for."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cacheblend.base.extras import needs_extra
from cacheblend.eval.data import Example, Task

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


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence against the best of the answers, 0..1.

    Raises:
        ConfigError: the package is not installed.
    """
    scorer = _scorer()
    return max(float(scorer.score(answer, prediction)["rougeL"].fmeasure) for answer in answers)


@functools.cache
def _scorer() -> Any:
    with needs_extra("eval"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=True)


def quality(example: Example, prediction: str) -> Mapping[str, float | None]:
    """The metrics of the example's task, each 0..1; the first is the one that methods are compared by.

    None where nobody gave a right answer.
    """
    if example.task is Task.SUMMARIZATION:
        return {"rouge_l": rouge_l(prediction, example.answers) if example.answers else None}
    if not example.answers:
        return {"f1": None, "em": None}
    return {"f1": f1(prediction, example.answers), "em": exact_match(prediction, example.answers)}
