"""How large a store may grow, and where it lives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option

from .eviction import NamespaceShare, RecentNamespaces, TierBudget

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where a store lives and how many bytes each tier may hold.

    Args:
        directory: a folder on a local file system; made when missing; an engine sets its own. Its file system needs room for
            one group of writes more than the NVMe budget (64 MiB, or one larger entry), since what is new is whole before what
            it displaces goes.
        ram_shares: what single namespaces may hold of the RAM budget, or have reserved in it.
        nvme_shares: the same of the NVMe budget.
        recent_share: 0..1 of each budget, reserved for each namespace that the shares do not name, as long as it is among those
            used last: so many of them as fit beside what the shares reserve. 0 reserves nothing for them.
        queue_bytes: keys and values that may wait to be written in the background before `put(flush=False)` blocks.

    Raises:
        ConfigError: an empty directory name, a number of bytes that is not a positive integer, a share outside 0..1, or shares
            that reserve more than the budget; by the store, direct reads on a file system without them.

    """

    directory: str | os.PathLike[str] = "cacheblend-store/kv"
    ram_budget_bytes: int = option(2 * GIB, "Bytes of KV held in RAM, as it is stored; what is above lies on disk alone.")
    nvme_budget_bytes: int = option(
        50 * GIB, "Bytes of KV on disk, headers included; the least recently used is evicted. Each process applies its own."
    )
    ram_shares: Mapping[str, NamespaceShare] = field(default_factory=dict)
    nvme_shares: Mapping[str, NamespaceShare] = field(default_factory=dict)
    recent_share: float = 0.0
    direct_reads: bool = option(False, "Read KV past the page cache, for a store larger than RAM.")
    queue_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise ConfigError("directory", self.directory, "name the folder that holds the store")
        for name in ("ram_budget_bytes", "nvme_budget_bytes", "queue_bytes"):
            check_bytes(name, getattr(self, name))
        check_share("recent_share", self.recent_share)
        for name, budget in zip(("ram_shares", "nvme_shares"), self.budgets(), strict=True):
            if budget.unreserved_bytes < 0:
                reserved_bytes = budget.bytes - budget.unreserved_bytes
                raise ConfigError(
                    name, dict(budget.shares), f"reserve at most the tier's {budget.bytes} bytes; got {reserved_bytes}"
                )

    def budgets(self) -> tuple[TierBudget, TierBudget]:
        """What RAM and what NVMe may hold, with one memory of which namespaces were used last."""
        plain = (TierBudget(self.ram_budget_bytes, self.ram_shares), TierBudget(self.nvme_budget_bytes, self.nvme_shares))
        ram, nvme = (replace(budget, recent_bytes=int(budget.bytes * self.recent_share)) for budget in plain)
        # As many as fit into both tiers, which also is what a use in either counts for.
        recent = RecentNamespaces(min(ram.most_recent, nvme.most_recent))
        return replace(ram, recent=recent), replace(nvme, recent=recent)


def check_bytes(name: str, value: object) -> None:
    """Refuse what is no budget.

    Raises:
        ConfigError: not a whole number of bytes above 0.

    """
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(name, value, "give a whole number of bytes above 0")


def check_share(name: str, value: object) -> None:
    """Refuse what is no share.

    Raises:
        ConfigError: not a number from 0 to 1.

    """
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(name, value, "a number from 0 to 1")
