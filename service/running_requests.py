"""The requests that run in this process, whoever's engine they use: work in the background gives way to them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RunningRequests:
    """Counts requests that run, and wakes who waits for there to be none. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def add(self, requests: int) -> None:
        """Count more, or fewer; 0 has those who wait look again."""
        with self._changed:
            self.count += requests
            self._changed.notify_all()

    def wait_for_none(self, timeout_s: float, given_up: Callable[[], bool]) -> None:
        """Return when none runs, the time is over, or the caller has given up."""
        with self._changed:
            self._changed.wait_for(lambda: given_up() or not self.count, timeout=timeout_s)


RUNNING = RunningRequests()  # of all engines, each tenant's too: what they share is the process's cores
