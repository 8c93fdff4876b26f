"""Transfer of a whole store to its remote tier, and back: what write-behind dropped, what another machine computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .remote_entry import RemoteEntry
from .remote_tier import RemoteTier

if TYPE_CHECKING:
    from cacheblend.store.kv_store import KVStore

GROUP = 64  # entries that are looked up together
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Report of `push` or `pull`.

    Args:
        entries: entries copied.
        bytes: of their keys and values.
        already_there: entries that the other side had.
        refused: entries that are damaged, or objects that are no entry of this deployment: not copied.
    """

    entries: int
    bytes: int
    already_there: int
    refused: int

    def as_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def push(store: KVStore, remote: RemoteTier, on_progress: Progress = lambda *_: None) -> TransferReport:
    """Write what a store has on NVMe and its remote tier has not.

    Where it is cut off, the same call goes on from there.

    Args:
        store: the store.
        remote: its remote tier.
        on_progress: called with entries done and entries in all.

    Raises:
        RemoteError: the remote tier does not answer, or is full.
    """
    rows = store.ls()
    entries = count = there = refused = done = 0
    for at in range(0, len(rows), GROUP):
        keys = [row.key for row in rows[at : at + GROUP]]
        sizes = remote.backend.sizes([remote.format.name(key.digest) for key in keys])
        for key, size in zip(keys, sizes, strict=True):
            if size is not None:
                there += 1
            elif (entry := store.load(key)) is None:
                refused += 1
            else:
                remote.send([entry])
                entries, count = entries + 1, count + entry.nbytes
            done += 1
            on_progress(done, len(rows))
    return TransferReport(entries, count, there, refused)


def pull(store: KVStore, remote: RemoteTier, on_progress: Progress = lambda *_: None) -> TransferReport:
    """Copy what a store's remote tier has to NVMe, checked and durable. They belong to no document, and live by use.

    Args:
        store: the store; what it has already is not read.
        remote: its remote tier.
        on_progress: called with entries done and entries in all.

    Raises:
        RemoteError: the remote tier does not answer.
        StoreFullError: the disk is full, or the NVMe budget has no room.
    """
    here = {remote.format.name(row.key.digest) for row in store.ls()}
    names = [name for name, _ in remote.backend.ls()]
    missing = [name for name in names if name not in here]
    entries = count = done = 0
    for at in range(0, len(missing), GROUP):
        wanted = missing[at : at + GROUP]
        found = [entry for entry in remote.entries(wanted) if entry is not None]
        entries += store.store_copies(remote.load_each(found))
        count += sum(entry.info.nbytes for entry in found)
        done += len(wanted)
        on_progress(done, len(missing))
    return TransferReport(entries, count, len(names) - len(missing), len(missing) - entries)


def list_entries(remote: RemoteTier) -> Iterator[tuple[str, int, RemoteEntry | None]]:
    """Name and bytes of every object of a remote tier, and its entry; None for what is no entry of this deployment.

    Raises:
        RemoteError: the remote tier does not answer.
    """
    objects = list(remote.backend.ls())
    for at in range(0, len(objects), GROUP):
        group = objects[at : at + GROUP]
        for (name, size), entry in zip(group, remote.entries([name for name, _ in group]), strict=True):
            yield name, size, entry
