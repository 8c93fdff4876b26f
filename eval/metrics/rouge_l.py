"""Rouge-L by the rouge-score package, on stemmed words as the paper takes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from cacheblend.base.errors import ConfigError


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence against the best of the answers, 0..1.

    Raises:
        ConfigError: the package is not installed.
    """
    scorer = _scorer()
    return max(float(scorer.score(answer, prediction)["rougeL"].fmeasure) for answer in answers)


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ConfigError("metric", "rouge_l", 'only with the package rouge-score: pip install "cacheblend[eval]"') from error
    return RougeScorer(["rougeL"], use_stemmer=True)
