"""Paired differences between two methods, with a bootstrap confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500  # bounds memory at 1,000 cases to 4 MB


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the paired differences and the bounds of its 95 % interval; None where one pair alone gives no interval."""

    mean: float
    low: float | None
    high: float | None


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """`ours` minus `theirs`, case by case, by a percentile bootstrap over cases; the same arguments give the same interval.

    Done with numpy: scipy's `bootstrap` is the same for a mean, and its import takes longer than a small run's report.
    """
    differences_N = np.subtract(ours, theirs)
    mean = float(differences_N.mean())
    if len(differences_N) < 2:
        return Difference(mean, None, None)
    rng = np.random.default_rng(seed)
    means = [
        rng.choice(differences_N, size=(_RESAMPLES_AT_ONCE, len(differences_N))).mean(axis=1)
        for _ in range(RESAMPLES // _RESAMPLES_AT_ONCE)
    ]
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [outside, 100 - outside])
    return Difference(mean, float(low), float(high))
