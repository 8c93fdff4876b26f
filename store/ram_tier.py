"""Copies of entries in RAM, the least recently used dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .entry import EncodedEntry
from .pins import Pins


class RamTier:
    """Entries by digest, up to a byte budget; pinned ones are never dropped to make room. Thread-safe."""

    def __init__(self, budget_bytes: int, pins: Pins) -> None:
        self.budget_bytes, self._pins = budget_bytes, pins
        self.bytes, self.evictions = 0, 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, EncodedEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def get(self, digest: str) -> EncodedEntry | None:
        """The entry, now the most recently used; None where it is not held."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is not None:
                self._entries.move_to_end(digest)
            return entry

    def put(self, digest: str, entry: EncodedEntry) -> bool:
        """Hold an entry; False, and nothing dropped, where the budget less what is pinned has no room for it."""
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                return True
            excess = self.bytes + entry.nbytes - self.budget_bytes
            victims = []
            for candidate, held in self._entries.items():
                if excess <= 0:
                    break
                if not self._pins.is_pinned(candidate):
                    victims.append(candidate)
                    excess -= held.nbytes
            if excess > 0:
                return False
            for victim in victims:
                self.bytes -= self._entries.pop(victim).nbytes
            self.evictions += len(victims)
            self._entries[digest] = entry
            self.bytes += entry.nbytes
            return True

    def discard(self, digest: str) -> None:
        """Let go of an entry, pinned or not: who reads it keeps its memory."""
        with self._lock:
            if (entry := self._entries.pop(digest, None)) is not None:
                self.bytes -= entry.nbytes

    def clear(self) -> None:
        """Let go of every entry."""
        with self._lock:
            self._entries.clear()
            self.bytes = 0
