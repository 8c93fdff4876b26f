"""Entries on their way to NVMe: readable at once, written in groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from .entry import EncodedEntry

GROUP_ENTRIES = 64
GROUP_BYTES = 64 * 2**20


class PendingEntries:
    """Entries that wait to be written, in the order of their putting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held while waiting for the disk
        self._entries: dict[str, EncodedEntry] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def add(self, entry: EncodedEntry) -> bool:
        """Have an entry wait; False where one of its key does already."""
        with self._lock:
            return self._entries.setdefault(entry.info.key.digest, entry) is entry

    def get(self, digest: str) -> EncodedEntry | None:
        """The entry; None where it does not wait."""
        return self._entries.get(digest)

    def group(self, entry: EncodedEntry) -> list[EncodedEntry]:
        """An entry and others of its namespace that wait, up to `GROUP_BYTES`, for one commit; none where it waits no more."""
        with self._lock:
            if self._entries.get(entry.info.key.digest) is not entry:
                return []
            group, held = [entry], entry.nbytes
            for other in self._entries.values():
                if other is entry or other.info.key.namespace != entry.info.key.namespace:
                    continue
                held += other.nbytes
                if len(group) == GROUP_ENTRIES or held > GROUP_BYTES:
                    break
                group.append(other)
            return group

    def discard(self, digests: Iterable[str]) -> None:
        """Let go of entries: they are written, or not to be written any more."""
        with self._lock:
            for digest in digests:
                self._entries.pop(digest, None)

    def clear(self) -> None:
        """Let go of every entry."""
        with self._lock:
            self._entries.clear()

    def size(self) -> tuple[int, int]:
        """How many there are, and their bytes."""
        with self._lock:
            return len(self._entries), sum(entry.nbytes for entry in self._entries.values())


def write_group(
    entries: Sequence[EncodedEntry], write: Callable[[Sequence[EncodedEntry]], None], failed: Callable[[EncodedEntry], None]
) -> None:
    """Write entries at once or, where that fails, one by one: what has no room together may have it so.

    Args:
        entries: what to write.
        write: stores all it is given, or raises and stores none.
        failed: told of each entry that cannot be written.

    Raises:
        Exception: the first that `write` raised for a single entry; the others were tried all the same.
    """
    errors: list[Exception] = []
    try:
        write(entries)
    except Exception:
        for entry in entries:
            try:
                write([entry])
            except Exception as error:
                errors.append(error)
                failed(entry)
    if errors:
        raise errors[0]
