"""Circuit breaker: calls to a remote that fails again and again are not made for a while, then one tries it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FAILURES = 3  # one after the other, that open it
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class CircuitBreaker:
    """Switch of calls to a remote: closed (yes), open (no), half open (one call, which decides). Thread-safe.

    It opens after `FAILURES` in a row. Each opening without a success between is twice as long, up to `MAX_PAUSE_S`.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._opened_at: float | None = None
        self._probing_since: float | None = None

    @property
    def state(self) -> str:
        """One of "closed", "open" and "half open"."""
        with self._lock:
            if self._opened_at is None:
                return "closed"
            return "half open" if self._probing_since is not None or self._may_probe() else "open"

    def allows(self) -> bool:
        """Whether to make a call; whoever is allowed one says how it ended."""
        with self._lock:
            if self._opened_at is None:
                return True
            if not self._may_probe():
                return False
            self._probing_since = self._clock()
            return True

    def succeed(self) -> None:
        """Note that a call was answered."""
        with self._lock:
            self._failures, self._pause_s = 0, FIRST_PAUSE_S
            self._opened_at = self._probing_since = None

    def fail(self) -> bool:
        """Note that a call was not answered; True where that opens the breaker, or keeps it open."""
        with self._lock:
            self._failures += 1
            if self._opened_at is not None:
                if self._probing_since is None:  # a call from before
                    return False
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            elif self._failures < FAILURES:
                return False
            self._opened_at, self._probing_since = self._clock(), None
            return True

    def wait_s(self) -> float:
        """Seconds until a call may be allowed; 0 for now. While one tries the remote, those until it counts as given up."""
        with self._lock:
            return self._pause_left_s()

    def _may_probe(self) -> bool:
        """Whether the pause is over, and nobody tries the remote; who tried it longer ago than a pause has given up."""
        return self._opened_at is not None and self._pause_left_s() == 0

    def _pause_left_s(self) -> float:
        since = self._opened_at if self._probing_since is None else self._probing_since
        return 0.0 if since is None else max(0.0, since + self._pause_s - self._clock())
