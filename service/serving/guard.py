"""When blending is no longer trusted at its ratio, and when it is again."""

from __future__ import annotations

from collections import deque
from statistics import fmean

STEP = 0.25  # of the ratio: from the paper's 0.15 to full recompute in four


class QualityGuard:
    """Raises one tenant's recompute ratio while its blended answers agree too little with full prefill's. Not thread-safe.

    A level is the least ratio that blended requests run at: 0 leaves them as they are planned, 1 is full recompute. Only checks
    of requests that ran at the level count, so a raise is judged anew. Raised, the level below is tried out on checked requests
    in the shadow of the served ones, and taken again once those agree: at full recompute nothing else could tell. It must agree
    better than the floor asks for, half-way to 1, so that the guard does not swing between two levels.

    Args:
        floor: least mean agreement, 0..1; 0 never raises.
        window: checks that a mean is over.
    """

    def __init__(self, floor: float, window: int) -> None:
        self._floor, self._window = floor, window
        self._levels = [0.0]
        self._served: deque[tuple[float, float]] = deque(maxlen=window)  # agreement, and the ratio it was served at
        self._kl_nats: deque[float] = deque(maxlen=window)
        self._lower: deque[float] = deque(maxlen=window)

    @property
    def level(self) -> float:
        """The least ratio that blended requests run at now."""
        return self._levels[-1]

    @property
    def lower_level(self) -> float | None:
        """The level to try out in the shadow; None where the ratio is not raised."""
        return self._levels[-2] if len(self._levels) > 1 else None

    @property
    def agreement(self) -> float | None:
        """Mean agreement of the last `window` requests served at this level; None where none was checked."""
        return fmean(agreement for agreement, _ in self._served) if self._served else None

    @property
    def first_token_kl_nats(self) -> float | None:
        """Mean first-token KL of the requests that `agreement` is of; it is told, and raises nothing."""
        return fmean(self._kl_nats) if self._kl_nats else None

    def see_served(self, agreement: float, *, level: float, ratio: float, kl_nats: float | None = None) -> bool:
        """A request was checked. True where that raises the level.

        Args:
            agreement: of its first tokens with full prefill's, 0..1.
            level: at which it was served; the level may have changed since.
            ratio: recompute ratio that it ran at.
            kl_nats: its first-token KL; None where it was not measured.
        """
        if level != self.level or level >= 1:
            return False
        if kl_nats is not None:
            self._kl_nats.append(kl_nats)
        self._served.append((agreement, ratio))
        # As soon as a window full of agreement from here on would not reach the floor; with a full window, its mean.
        missing = self._window - len(self._served)
        if sum(one for one, _ in self._served) + missing >= self._floor * self._window:
            return False
        self._levels.append(min(1.0, max(ratio for _, ratio in self._served) + STEP))
        self._forget()
        return True

    def see_lower(self, agreement: float, *, level: float) -> bool:
        """The level below `level` was tried out on a request that was served at `level`. True where it is taken again."""
        if level != self.level or len(self._levels) == 1:
            return False
        self._lower.append(agreement)
        if len(self._lower) < self._window or fmean(self._lower) < (1 + self._floor) / 2:
            return False
        self._levels.pop()
        self._forget()
        return True

    def _forget(self) -> None:
        self._served.clear()
        self._kl_nats.clear()
        self._lower.clear()
