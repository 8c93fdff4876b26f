"""Checks every byte of a store, and mends what can be mended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from .entry_file import EntryFile
from .errors import DamagedEntryError
from .nvme_tier import NvmeTier


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `KVStore.verify` found; entries by the hex of their keys.

    Args:
        entries: entries in the catalogue.
        bytes: bytes of their files.
        damaged: entries whose file is not what was written; repaired by setting them aside.
        missing: entries without a file; repaired by dropping them.
        orphans: files without an entry; repaired by entering whole ones into the catalogue and setting others aside.
        leftovers: files that a crash left half written; removed.
        repaired: whether it was all mended.

    """

    entries: int
    bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    orphans: tuple[str, ...]
    leftovers: int
    repaired: bool

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not (self.damaged or self.missing or self.orphans or self.leftovers)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def verify(nvme: NvmeTier, *, repair: bool, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Compare catalogue and files, and check every header and every layer; the store may be in use meanwhile.

    Args:
        nvme: the tier to check.
        repair: mend what is found.
        on_progress: called with entries done and entries in all.

    """
    leftovers = nvme.leftovers(remove=repair)
    rows = nvme.catalogue.entries()
    damaged: list[str] = []
    missing: list[str] = []
    for done, row in enumerate(rows, start=1):
        digest = row.key.digest
        if not _is_whole(nvme, digest) and digest in nvme:
            (damaged if nvme.folder.entry_path(digest).exists() else missing).append(digest)
            if repair:
                nvme.set_aside(digest, range(row.layers))
        if on_progress is not None:
            on_progress(done, len(rows))
    orphans = []
    for path in nvme.folder.entry_files():
        with nvme.exclusive:
            if path.name not in nvme.catalogue and path.exists():
                orphans.append(path.name)
                if repair:
                    nvme.adopt(path)
    return VerifyReport(
        entries=len(rows),
        bytes=sum(row.bytes for row in rows),
        damaged=tuple(damaged),
        missing=tuple(missing),
        orphans=tuple(orphans),
        leftovers=leftovers,
        repaired=repair,
    )


def _is_whole(nvme: NvmeTier, digest: str) -> bool:
    try:
        with EntryFile.open(nvme.folder.entry_path(digest), digest) as file:
            for layer in range(file.info.layers):
                file.read_layer(layer)
    except DamagedEntryError:
        return False
    return True
