"""When requests come."""

from __future__ import annotations

import numpy as np


def poisson_arrivals(rate_rps: float, count: int, seed: int) -> list[float]:
    """Moments, in seconds from the start, of a Poisson process: gaps are exponential with mean 1 / rate.

    Args:
        rate_rps: arrivals a second, in the mean.
        count: how many.
        seed: the same one gives the same moments, and at another rate the same ones stretched.
    """
    return [float(moment) for moment in np.random.default_rng(seed).exponential(1.0, count).cumsum() / rate_rps]
