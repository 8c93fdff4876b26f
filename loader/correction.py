"""How far a prediction is off, learnt slowly enough that equal requests get equal plans."""

from __future__ import annotations

import statistics

WINDOW = 8  # requests
STEP = 1.1
MOST = 16.0


class Correction:
    """A factor on predicted seconds that moves only where the median of several requests says so.

    It is the same for all requests between two moves. It moves when the median of the last `WINDOW` requests is off by more
    than `STEP`, and nothing but the order of what was seen decides. One slow request moves nothing.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen: list[float] = []

    def see(self, predicted_s: float, real_s: float) -> bool:
        """Note a request's seconds beside the uncorrected prediction; True where the factor moved."""
        if predicted_s <= 0 or real_s <= 0:
            return False
        self._seen = [*self._seen[-(WINDOW - 1) :], real_s / predicted_s]
        if len(self._seen) < WINDOW:
            return False
        median = min(max(statistics.median(self._seen), 1 / MOST), MOST)
        if 1 / STEP <= median / self.factor <= STEP:
            return False
        self.factor, self._seen = median, []
        return True
