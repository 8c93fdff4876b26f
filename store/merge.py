"""Merging of stores: the shards of an ingest, computed on several machines, into one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cacheblend.base.errors import InputError, StoreDirectoryError

from .eviction import Pins, TierBudget
from .layout import StoreFolder, holds_store
from .nvme_tier import NvmeTier
from .write_queue import PendingWrite

_UNBOUNDED = 2**62  # neither side evicts while it is merged


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Report of `merge`.

    Args:
        entries: entries copied.
        bytes: bytes of their files.
        already_stored: entries that the target had.
        damaged: entries whose file was not what was written: set aside in their store, and not copied.
        documents: documents noted, those that the target knew included.
        dropped: chunks of replaced documents that no document has any more; their KV was removed from the target.

    """

    entries: int
    bytes: int
    already_stored: int
    damaged: int
    documents: int
    dropped: int

    def as_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def merge(sources: Sequence[Path], target: Path, *, on_progress: Callable[[int, int], None] | None = None) -> MergeReport:
    """Copy the entries and documents of stores into one, as if their documents had been ingested into it in this order.

    An entry is read with its checksums and written as it is, durable before the next. One that is in several stores is kept
    once. A document that is in several, in different versions, is the last one's; one that is pinned anywhere is pinned. Where
    it is cut off, the same call goes on from there. The stores may be in use meanwhile; what comes later may be left out.

    Args:
        sources: the folders of the stores to copy from.
        target: the folder of the store to copy into, made when missing. No budget holds: whoever opens it next applies theirs.
        on_progress: called with entries done and entries in all.

    Raises:
        InputError: no source, or the target among the sources.
        StoreDirectoryError: a folder is no store, is of another format, or cannot be written; nothing is copied then.
        StoreFullError: the disk is full.

    """
    check_stores(sources, target)
    with ExitStack() as opened:
        given = [_open(source, opened) for source in sources]
        into = _open(target, opened)
        total = sum(tier.catalog.totals()[0] for tier in given)
        done = entries = copied_bytes = already_stored = documents = dropped = 0
        for tier in given:
            noted, unused = _note_documents(tier, into)
            documents, dropped = documents + noted, dropped + unused
            for row in tier.catalog.entries():
                if row.key.digest in into:
                    already_stored += 1
                elif (entry := tier.load(row.key.digest)) is not None:
                    into.write([PendingWrite(entry)])
                    entries, copied_bytes = entries + 1, copied_bytes + row.bytes
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
        damaged = sum(tier.damaged for tier in given)
    return MergeReport(entries, copied_bytes, already_stored, damaged, documents, dropped)


def check_stores(sources: Sequence[Path], target: Path) -> None:
    """Refuse folders that cannot be merged, before anything is copied; raises as `merge` does."""
    if not sources:
        raise InputError("no store to merge; name at least one")
    for source in sources:
        if not holds_store(source):  # to open it would be to make one
            raise StoreDirectoryError(f"{source} holds no store; name the folder of one")
        if source.resolve() == target.resolve():
            raise InputError(f"{source} is both merged and merged into; leave it out of the stores to merge")
    for folder in (*sources, *([target] if holds_store(target) else [])):
        StoreFolder(folder)


def _open(root: Path, opened: ExitStack) -> NvmeTier:
    tier = NvmeTier(StoreFolder(root), TierBudget(_UNBOUNDED), Pins())
    opened.callback(tier.close)
    return tier


def _note_documents(tier: NvmeTier, into: NvmeTier) -> tuple[int, int]:
    """How many documents of one store are known to the other now, and how many chunks went with their other versions."""
    given, table = tier.documents, into.documents
    noted = dropped = 0
    for page in given.pages():
        rows = [(id_, version, given.digests([id_])) for id_, version, _ in page]
        before = table.digests(id_ for id_, _, _ in page)
        with into.exclusive(), into.changing(before):
            dropped += len(table.put(rows))
            for id_, _, pinned in page:
                if pinned:
                    table.set_pinned(id_, True)
        noted += len(page)
    return noted, dropped
