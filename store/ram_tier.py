"""RAM: copies of entries, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import ClassVar

from .entry import EncodedEntry
from .eviction import AdmissionFilter, Evictable, HeldBytes, Pins, select_victims


class RamTier:
    """The `CacheTier` in memory: entries by digest, up to a byte budget."""

    name: ClassVar[str] = "ram"
    in_memory: ClassVar[bool] = True

    def __init__(self, budget_bytes: int, pins: Pins) -> None:
        self.budget_bytes, self._pins = budget_bytes, pins
        self.evictions = 0
        self.held_bytes = HeldBytes()
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, EncodedEntry] = OrderedDict()
        self._recent_reads = AdmissionFilter(budget_bytes)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def size(self) -> tuple[int, int]:
        return len(self._entries), self.held_bytes()

    def open(self, digest: str) -> EncodedEntry | None:
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                self._entries.move_to_end(digest)
            return entry

    def put(self, entry: EncodedEntry) -> bool:
        """Hold the entry itself, without a copy."""
        digest, namespace = entry.info.key.digest, entry.info.key.namespace
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return True
            victims: list[str] = []
            if not select_victims(self, victims, namespace, entry.nbytes):
                return False
            for victim in victims:
                self._drop(victim)
            self.evictions += len(victims)
            self._entries[digest] = entry
            self.held_bytes.add(namespace, entry.nbytes)
            return True

    def admits(self, digest: str, entry_bytes: int) -> bool:
        """Whether there is room, or the entry was read recently.

        Recently means: at most the budget in bytes was read since. So one pass over many entries that rarely come again
        copies and evicts nothing.
        """
        again = self._recent_reads.admits(digest, entry_bytes)
        return entry_bytes <= self.budget_bytes and (again or self.held_bytes() + entry_bytes <= self.budget_bytes)

    def discard(self, digest: str) -> None:
        """Remove the entry; a reader still holds its memory."""
        with self._lock:
            if digest in self._entries:
                self._drop(digest)

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        self.discard(digest)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.held_bytes = HeldBytes()

    def close(self) -> None:
        """Nothing must be closed."""

    def evictable(self, only: str | None = None, spare: str | None = None) -> Iterator[Evictable[str]]:
        """Entries in LRU order, for `put`, under its lock."""
        for digest, entry in self._entries.items():
            if only in (None, entry.info.key.namespace) and entry.info.key.namespace != spare:
                yield Evictable(digest, entry.nbytes)

    def begin_evict(self, name: str) -> bool:
        return not self._pins.is_pinned(name)

    def _drop(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        self.held_bytes.add(entry.info.key.namespace, -entry.nbytes)
