"""Verification and repair of a store, to the last byte."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from cacheblend.base.errors import DamagedEntryError

from .catalog import CatalogEntry
from .entry_file import EntryFile
from .nvme_tier import NvmeTier


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Findings of `KVStore.verify`; entries by the hex of their keys.

    Args:
        entries: entries in the catalog.
        bytes: bytes of their files.
        damaged: entries whose file is not what was written; repaired by setting them aside.
        missing: entries without a file; repaired by dropping them.
        mismatched: entries of which the catalog says something else than their file; repaired by what the file says.
        orphans: files without an entry; repaired by entering complete ones into the catalog and setting others aside.
        leftovers: files that a crash left half written; removed.
        miscounted: whether the catalog's totals and pins do not follow from its entries; repaired by counting anew.
        repaired: whether all of it was repaired.

    """

    entries: int
    bytes: int
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    mismatched: tuple[str, ...]
    orphans: tuple[str, ...]
    leftovers: int
    miscounted: bool
    repaired: bool

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not (self.damaged or self.missing or self.mismatched or self.orphans or self.leftovers or self.miscounted)

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def verify(nvme: NvmeTier, *, repair: bool, on_progress: Callable[[int, int], None] | None) -> VerifyReport:
    """Compare catalog and files, and check every header and every layer; the store may be in use meanwhile.

    Args:
        nvme: the tier to check.
        repair: change what is found.
        on_progress: called with entries done and entries in all.

    """
    leftovers = nvme.leftovers(remove=repair)
    with nvme.exclusive():
        if (miscounted := nvme.catalog.is_miscounted()) and repair:
            nvme.catalog.count_anew()
    total, _ = nvme.catalog.totals()
    entries = entry_bytes = 0
    found: dict[str, list[str]] = {"damaged": [], "missing": [], "mismatched": []}
    for row in nvme.catalog.entries():
        digest = row.key.digest
        entries, entry_bytes = entries + 1, entry_bytes + row.bytes
        if (diagnosis := _diagnose(nvme, row)) and digest in nvme:
            found[diagnosis].append(digest)
            if repair and diagnosis == "mismatched":
                nvme.adopt(nvme.folder.entry_path(digest))
            elif repair:
                nvme.set_aside(digest, range(row.layers))
        if on_progress is not None:
            on_progress(entries, max(entries, total))
    orphans = []
    for path in nvme.folder.entry_files():
        with nvme.exclusive():
            if path.name not in nvme.catalog and path.exists():
                orphans.append(path.name)
                if repair:
                    nvme.adopt(path)
    return VerifyReport(
        entries=entries,
        bytes=entry_bytes,
        damaged=tuple(found["damaged"]),
        missing=tuple(found["missing"]),
        mismatched=tuple(found["mismatched"]),
        orphans=tuple(orphans),
        leftovers=leftovers,
        miscounted=miscounted,
        repaired=repair,
    )


def _diagnose(nvme: NvmeTier, row: CatalogEntry) -> str | None:
    path = nvme.folder.entry_path(row.key.digest)
    try:
        with EntryFile.open(path, row.key.digest) as file:
            for layer in range(file.info.num_layers):
                file.read_layer(layer)
            found_row = nvme.row_of(file, path)
    except DamagedEntryError:
        return "damaged" if path.exists() else "missing"
    same = (found_row.key, found_row.tokens, found_row.layers, found_row.bytes) == (row.key, row.tokens, row.layers, row.bytes)
    return None if same else "mismatched"
