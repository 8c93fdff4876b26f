"""Copies of entries in RAM, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from .entry import EncodedEntry
from .eviction import Evictable, Pins, SeenBefore, TierBudget


class RamTier:
    """Entries by digest, up to a byte budget; pinned ones are never dropped to make room. Thread-safe."""

    def __init__(self, budget: TierBudget, pins: Pins) -> None:
        self.budget, self._pins = budget, pins
        self.evictions = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, EncodedEntry] = OrderedDict()
        self._held: Counter[str] = Counter()  # bytes by namespace
        self._bytes = 0
        self._read = SeenBefore(budget.bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    def get(self, digest: str) -> EncodedEntry | None:
        """The entry, now the most recently used; None where it is not held."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                self._entries.move_to_end(digest)
                self.budget.used(entry.info.key.namespace)
            return entry

    def put(self, digest: str, entry: EncodedEntry) -> bool:
        """Hold an entry; False, and nothing dropped, where the budget less what is pinned has no room for it."""
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return True
            victims: list[str] = []

            def take(candidate: str) -> bool:
                free = not self._pins.is_pinned(candidate)
                if free:
                    victims.append(candidate)
                return free

            namespace = entry.info.key.namespace
            self.budget.used(namespace)
            if not self.budget.choose(namespace, entry.nbytes, self._bytes, self._held.__getitem__, self._evictable, take):
                return False
            for victim in victims:
                self._drop(victim)
            self.evictions += len(victims)
            self._entries[digest] = entry
            self._held[namespace] += entry.nbytes
            self._bytes += entry.nbytes
            return True

    def wants(self, digest: str, entry_bytes: int) -> bool:
        """Whether an entry that was just read from NVMe is worth a copy: there is room, or it was read not long ago as well.

        Not long ago is: no more bytes came from NVMe since than the budget. So one pass over many entries, of which few come
        again, copies and evicts nothing, which took an eighth of the time of requests over a small model.
        """
        again = self._read.again(digest, entry_bytes)
        return entry_bytes <= self.budget.bytes and (again or self._bytes + entry_bytes <= self.budget.bytes)

    def discard(self, digest: str) -> None:
        """Let go of an entry, pinned or not: who reads it keeps its memory."""
        with self._lock:
            if digest in self._entries:
                self._drop(digest)

    def clear(self) -> None:
        """Let go of every entry."""
        with self._lock:
            self._entries.clear()
            self._held.clear()
            self._bytes = 0

    def _drop(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        namespace = entry.info.key.namespace
        self._held[namespace] -= entry.nbytes
        self._bytes -= entry.nbytes
        if not self._held[namespace]:
            del self._held[namespace]

    def _evictable(self, *, only: str | None = None, spare: Iterable[str] = ()) -> Iterator[Evictable[str]]:
        spared = frozenset(spare)
        for digest, entry in self._entries.items():
            namespace = entry.info.key.namespace
            if namespace == only or (only is None and namespace not in spared):
                yield Evictable(digest, namespace, entry.nbytes)
