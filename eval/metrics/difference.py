"""Paired differences between two methods, with a bootstrap confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

CONFIDENCE = 0.95
RESAMPLES = 9_999


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the paired differences and the bounds of its 95 % interval; None where one pair alone gives no interval."""

    mean: float
    low: float | None
    high: float | None


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """`ours` minus `theirs`, case by case, by a percentile bootstrap over cases; the same arguments give the same interval."""
    differences_N = np.subtract(ours, theirs)
    mean = float(differences_N.mean())
    if len(differences_N) < 2:
        return Difference(mean, None, None)
    rng = np.random.default_rng(seed)
    found = bootstrap(
        (differences_N,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        batch=500,
        rng=rng,
    )
    return Difference(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))
