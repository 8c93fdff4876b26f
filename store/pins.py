"""Which entries are in use, and which are on their way out: an entry is never both."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Pins:
    """Counts of pins by digest, and the digests that an eviction has chosen; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._leaving: set[str] = set()

    @contextmanager
    def hold(self, digests: Sequence[str]) -> Iterator[None]:
        """Keep entries from being evicted; look them up after this, since one that is leaving already still goes."""
        with self._lock:
            self._pinned.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._pinned.subtract(digests)
                for digest in set(digests):
                    if not self._pinned[digest]:
                        del self._pinned[digest]

    def is_pinned(self, digest: str) -> bool:
        """Whether an eviction must spare the entry."""
        return digest in self._pinned

    def start_leaving(self, digest: str) -> bool:
        """Choose an entry for eviction; False where it is pinned."""
        with self._lock:
            if digest in self._pinned:
                return False
            self._leaving.add(digest)
            return True

    def is_leaving(self, digest: str) -> bool:
        """Whether the entry counts as gone although its row and file are still there."""
        return digest in self._leaving

    def stop_leaving(self, digests: Sequence[str]) -> None:
        """The eviction is over: it is done, or it failed."""
        with self._lock:
            self._leaving.difference_update(digests)
