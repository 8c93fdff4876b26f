"""Entries on their way to NVMe: readable at once, written in groups, each with a result of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from .entry import EncodedEntry

GROUP_ENTRIES = 64
GROUP_BYTES = 64 * 2**20
DocumentVersion = tuple[str, str]  # a document's id and version


def started() -> Future[bool]:
    """A result that is yet to come and cannot be cancelled."""
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """An entry that is to be written.

    Args:
        entry: the entry.
        document: whose chunk it is, where that was ingested; written only while the store knows the document in that version.
        stored: True once the entry is durable; False where it was deleted, or its document was, before that; or the error.
    """

    entry: EncodedEntry
    document: DocumentVersion | None = None
    stored: Future[bool] = field(default_factory=started)

    @property
    def digest(self) -> str:
        """The entry's key."""
        return self.entry.info.key.digest


class PendingEntries:
    """Entries that wait to be written, in the order of their putting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while waiting for the disk
        self._writes: dict[str, PendingWrite] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._writes

    def add(self, write: PendingWrite) -> PendingWrite:
        """Have an entry wait; gives the one of its key that waits already, if one does."""
        with self._lock:
            return self._writes.setdefault(write.digest, write)

    def get(self, digest: str) -> EncodedEntry | None:
        """The entry; None where it does not wait."""
        write = self._writes.get(digest)
        return None if write is None else write.entry

    def group(self, write: PendingWrite) -> list[PendingWrite]:
        """An entry and others of its namespace that wait, up to `GROUP_BYTES`, for one commit; none where it waits no more."""
        with self._lock:
            if self._writes.get(write.digest) is not write:
                return []
            group, held = [write], write.entry.nbytes
            for other in self._writes.values():
                if other is write or other.entry.info.key.namespace != write.entry.info.key.namespace:
                    continue
                held += other.entry.nbytes
                if len(group) == GROUP_ENTRIES or held > GROUP_BYTES:
                    break
                group.append(other)
            return group

    def end(self, digest: str, stored: bool | Exception) -> None:
        """Let go of an entry, and tell who put it what became of it; nothing where it does not wait."""
        with self._lock:
            write = self._writes.pop(digest, None)
        if write is None:
            return
        if isinstance(stored, Exception):
            write.stored.set_exception(stored)
        else:
            write.stored.set_result(stored)

    def discard(self, digests: Iterable[str]) -> None:
        """Let go of entries that are not to be written any more."""
        for digest in digests:
            self.end(digest, False)

    def clear(self) -> None:
        """Let go of every entry."""
        self.discard(list(self._writes))

    def size(self) -> tuple[int, int]:
        """How many there are, and their bytes."""
        with self._lock:
            return len(self._writes), sum(write.entry.nbytes for write in self._writes.values())


def write_group(
    writes: Sequence[PendingWrite],
    write: Callable[[Sequence[PendingWrite]], None],
    failed: Callable[[PendingWrite, Exception], None],
) -> None:
    """Write entries at once or, where that fails, one by one: what has no room together may have it so.

    Args:
        writes: what to write.
        write: stores all it is given, or raises and stores none.
        failed: told of each entry that cannot be written, and why.

    """
    try:
        write(writes)
    except Exception:
        for one in writes:
            try:
                write([one])
            except Exception as error:
                failed(one, error)
