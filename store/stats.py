"""What a store holds and what it has done."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Event = Literal["ram_hit", "nvme_hit", "miss", "failed_write"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and hits and evictions since the store was opened by this process."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's tiers, and what happened since it was opened by this process.

    Args:
        ram: copies in RAM; its hits include entries that wait to be written.
        nvme: entries on NVMe, whichever process wrote them.
        misses: keys that `get` and `pin` did not find.
        damaged: entries that were set aside.
        pending_writes: entries that wait to be written in the background.
        pending_bytes: their bytes.
        failed_writes: entries that the background could not write.

    """

    ram: TierStats
    nvme: TierStats
    misses: int
    damaged: int
    pending_writes: int
    pending_bytes: int
    failed_writes: int

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and dicts, for JSON."""
        return dataclasses.asdict(self)


class Events:
    """Counts what happens in a store; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, event: Event) -> None:
        """One more of them."""
        with self._lock:
            self._counts[event] += 1

    def __getitem__(self, event: Event) -> int:
        return self._counts[event]
