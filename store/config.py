"""How large a store may grow, and where it lives."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import ConfigError

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where a store lives and how many bytes each tier may hold.

    Args:
        directory: a folder on a local file system; made when missing. Its file system needs room for one entry more than
            the NVMe budget, since a new entry is whole before the ones it displaces go.
        ram_budget_bytes: keys and values held in RAM. Entries above it are kept on NVMe alone.
        nvme_budget_bytes: files on NVMe, headers included.
        queue_bytes: keys and values that may wait to be written in the background before `put(flush=False)` blocks.

    Raises:
        ConfigError: an empty directory name, or a number of bytes that is not a positive integer.

    """

    directory: str | os.PathLike[str]
    ram_budget_bytes: int = 2 * GIB
    nvme_budget_bytes: int = 50 * GIB
    queue_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike) or not os.fspath(self.directory):
            raise ConfigError("directory", self.directory, "name the folder that holds the store")
        for field in ("ram_budget_bytes", "nvme_budget_bytes", "queue_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ConfigError(field, value, "give a whole number of bytes above 0")
