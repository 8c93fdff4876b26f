"""How large a store may grow, and where it lives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import ConfigError
from .eviction import NamespaceShare, TierBudget

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where a store lives and how many bytes each tier may hold.

    Args:
        directory: a folder on a local file system; made when missing. Its file system needs room for one entry more than
            the NVMe budget, since a new entry is whole before the ones it displaces go.
        ram_budget_bytes: keys and values held in RAM, as they are stored. Entries above it are kept on NVMe alone.
        nvme_budget_bytes: files on NVMe, headers included. Where processes share a store, each applies its own as it writes.
        ram_shares: what single namespaces may hold of the RAM budget, or have reserved in it.
        nvme_shares: the same of the NVMe budget.
        direct_reads: read layers past the page cache, for a store larger than RAM.
        queue_bytes: keys and values that may wait to be written in the background before `put(flush=False)` blocks.

    Raises:
        ConfigError: an empty directory name, a number of bytes that is not a positive integer, or shares that reserve more than
            the budget; by the store, direct reads on a file system without them.

    """

    directory: str | os.PathLike[str]
    ram_budget_bytes: int = 2 * GIB
    nvme_budget_bytes: int = 50 * GIB
    ram_shares: Mapping[str, NamespaceShare] = field(default_factory=dict)
    nvme_shares: Mapping[str, NamespaceShare] = field(default_factory=dict)
    direct_reads: bool = False
    queue_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise ConfigError("directory", self.directory, "name the folder that holds the store")
        for name in ("ram_budget_bytes", "nvme_budget_bytes", "queue_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(name, value, "give a whole number of bytes above 0")
        for name, budget in (("ram_shares", self.ram_budget()), ("nvme_shares", self.nvme_budget())):
            reserved_bytes = sum(share.reserved_bytes for share in budget.shares.values())
            if reserved_bytes > budget.bytes:
                raise ConfigError(
                    name, dict(budget.shares), f"reserve at most the tier's {budget.bytes} bytes; got {reserved_bytes}"
                )

    def ram_budget(self) -> TierBudget:
        """What RAM may hold."""
        return TierBudget(self.ram_budget_bytes, self.ram_shares)

    def nvme_budget(self) -> TierBudget:
        """What NVMe may hold."""
        return TierBudget(self.nvme_budget_bytes, self.nvme_shares)
