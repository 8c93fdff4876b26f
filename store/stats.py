"""Statistics of a store: what its tiers hold, and what happened since it was opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tiers import NVME, RAM, REMOTE

if TYPE_CHECKING:
    from .remote.remote_tier import RemoteStats


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
        tiers: by name, the fastest first; RAM's hits include entries that wait to be written.
        misses: keys that `get` and `pin` did not find.
        damaged: entries that were set aside.
        pending_writes: entries that wait to be written in the background.
        pending_bytes: their bytes.
        failed_writes: entries that the background could not write.
        remote: what the remote tier did; None where there is none.
    """

    tiers: Mapping[str, TierStats]
    misses: int
    damaged: int
    pending_writes: int
    pending_bytes: int
    failed_writes: int
    remote: RemoteStats | None = None

    @property
    def ram(self) -> TierStats:
        """Copies in RAM."""
        return self.tiers[RAM]

    @property
    def nvme(self) -> TierStats:
        """Entries on NVMe, whichever process wrote them."""
        return self.tiers[NVME]

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and dicts, for JSON: a tier by its name."""
        plain = dataclasses.asdict(self)
        tiers: dict[str, object] = plain.pop("tiers")
        remote = plain.pop(REMOTE)
        return tiers | ({} if remote is None else {REMOTE: remote}) | plain
