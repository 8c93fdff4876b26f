"""Write queue: entries on their way to NVMe, readable at once, written in groups by a thread, each with a result of its own."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from cacheblend.base.errors import StoreError
from cacheblend.base.options import MIB

from .entry import EncodedEntry

logger = logging.getLogger(__name__)

GROUP_ENTRIES, GROUP_BYTES = 64, 64 * MIB  # of one commit; a larger entry has a commit of its own
MAX_DISCARDED = 65_536  # digests that are remembered
_MAX_OFFERS = 16
DocumentVersion = tuple[str, str]  # a document's id and version


def _pending_result() -> Future[bool]:
    future: Future[bool] = Future()
    future.set_running_or_notify_cancel()  # nobody can cancel it
    return future


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """An entry that is to be written, the document whose chunk it is, and what came of it; see `KVStore.put`."""

    entry: EncodedEntry
    document: DocumentVersion | None = None
    is_copy: bool = False  # of an object in the remote tier
    stored: Future[bool] = field(default_factory=_pending_result)

    @property
    def digest(self) -> str:
        return self.entry.info.key.digest


class WriteQueue:
    """Entries that wait to be written, in the order of their putting, and the thread that writes them. Thread-safe.

    The thread starts with the first entry. Between entries it holds no reference to who gave them, so that a store that was not
    closed can be collected, and warn.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()  # never held while waiting for the disk
        self._writes: dict[str, PendingWrite] = {}
        self._bytes = 0
        self._write: Callable[[PendingWrite], None] | None = None  # held while entries wait
        self._offers: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.generation = self._all_discarded_at = 0  # number of discards until now; see `add`
        self._discarded_at: dict[str, int] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._writes

    def get(self, digest: str) -> EncodedEntry | None:
        """The entry; None where it does not wait."""
        write = self._writes.get(digest)
        return None if write is None else write.entry

    def size(self) -> tuple[int, int]:
        """Number of entries that wait, and their bytes."""
        with self._changed:
            return len(self._writes), self._bytes

    def add(self, write: PendingWrite, writer: Callable[[PendingWrite], None], since: int | None = None) -> PendingWrite | None:
        """Have an entry wait.

        Args:
            write: the entry.
            writer: called in the thread with the entry that has waited longest; it ends a group of entries, or this one.
            since: the `generation` in which the entry was looked up; None for an entry that is new.

        Returns:
            The entry of its key that waits already, if one does; else `write`. None if the entry was discarded after `since`.

        Raises:
            StoreError: the queue was closed.
        """
        with self._changed:
            if self._stopping:
                raise StoreError("the store was closed before the entry was queued")
            if since is not None and max(self._discarded_at.get(write.digest, 0), self._all_discarded_at) > since:
                return None
            waiting = self._writes.setdefault(write.digest, write)
            if waiting is write:
                self._bytes += write.entry.nbytes
                self._write = writer
                self._wake()
            return waiting

    def wait_for_room(self) -> None:
        """Block while more bytes wait than the limit, except for one entry."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes <= self._limit_bytes or len(self._writes) < 2)

    def group(self) -> list[PendingWrite]:
        """The entries for one commit, those that have waited longest."""
        with self._changed:
            group, group_bytes = list[PendingWrite](), 0
            for write in self._writes.values():
                group_bytes += write.entry.nbytes
                if group and (len(group) == GROUP_ENTRIES or group_bytes > GROUP_BYTES):
                    break
                group.append(write)
            return group

    def end(self, digest: str, stored: bool | Exception) -> None:
        """Let go of an entry, and set the result of its put; nothing where it does not wait."""
        with self._changed:
            write = self._writes.pop(digest, None)
            if write is None:
                return
            self._bytes -= write.entry.nbytes
            self._changed.notify_all()
        if isinstance(stored, Exception):
            write.stored.set_exception(stored)
        else:
            write.stored.set_result(stored)

    def discard(self, digests: Sequence[str]) -> None:
        """Let go of entries that are not to be written any more."""
        with self._changed:
            self.generation += 1
            self._discarded_at |= dict.fromkeys(digests, self.generation)
            if len(self._discarded_at) > MAX_DISCARDED:  # what is forgotten counts for all
                self._all_discarded_at = self.generation
                self._discarded_at.clear()
        for digest in digests:
            self.end(digest, False)

    def offer(self, job: Callable[[], None]) -> None:
        """Queue a job that is merely useful: dropped when there is much to do."""
        with self._changed:
            if not self._stopping and len(self._offers) < _MAX_OFFERS:
                self._offers.append(job)
                self._wake()

    def flush(self) -> None:
        """Wait until all entries that wait now are written, or given up, and the jobs offered before are done."""
        with self._changed:
            writes, last = list(self._writes.values()), list(self._offers)[-1:]
        wait(write.stored for write in writes)
        with self._changed:
            self._changed.wait_for(lambda: all(job not in self._offers for job in last))

    def stop(self) -> None:
        """End the thread once nothing waits, without waiting for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cacheblend-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._offers or self._stopping)
                if not self._writes and not self._offers:
                    return
                first, writer = next(iter(self._writes.values()), None), self._write
                job = self._offers[0] if self._offers else None
            if job is not None:  # before the entry: what it uses counts as used earlier
                try:
                    job()
                except Exception as error:  # the thread must go on with the others
                    logger.error("work in the background failed: %s", error)
                with self._changed:
                    self._offers.popleft()
                    self._changed.notify_all()
            if first is not None and writer is not None:
                try:
                    writer(first)
                except Exception as error:
                    self.end(first.digest, error)
            del first, writer, job
            with self._changed:
                if not self._writes:
                    self._write = None
