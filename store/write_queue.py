"""Entries on their way to NVMe: readable at once, written in groups, each with a result of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cacheblend.base.errors import StoreError

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


logger = logging.getLogger(__name__)

_MAX_OFFERS = 16


class Background:
    """Runs jobs one after the other, in order, on a thread that starts with the first.

    A job that raises is logged, and the next one runs: whoever wants to know how a job went has it say so itself. It keeps no
    reference to who gave it jobs that are done, so that an unclosed store can be collected, and warn.

    Args:
        queue_bytes: bytes of submitted jobs that may wait; a larger one waits alone.

    """

    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._given, self._done, self._waiting_bytes = 0, 0, 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], job_bytes: int) -> None:
        """Queue a job; blocks while the queue is full.

        Raises:
            StoreError: the thread was told to end.

        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or not self._waiting_bytes or self._waiting_bytes + job_bytes <= self._queue_bytes
            )
            if self._stopping:
                raise StoreError("the store was closed before the entry was queued")
            self._add(job, job_bytes)

    def offer(self, job: Callable[[], None]) -> None:
        """Queue a job that is merely useful: dropped when there is much to do."""
        with self._changed:
            if not self._stopping and len(self._jobs) < _MAX_OFFERS:
                self._add(job, 0)

    def flush(self) -> None:
        """Wait until all jobs given so far are done, well or not."""
        with self._changed:
            given = self._given
            self._changed.wait_for(lambda: self._done >= given)

    def stop(self) -> None:
        """End the thread once its jobs are done, without waiting for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish all jobs and end the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _add(self, job: Callable[[], None], job_bytes: int) -> None:
        self._jobs.append((job, job_bytes))
        self._given += 1
        self._waiting_bytes += job_bytes
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cacheblend-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job, job_bytes = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # the thread must go on with the others
                logger.error("work in the background failed: %s", error)
            del job
            with self._changed:
                self._done += 1
                self._waiting_bytes -= job_bytes
                self._changed.notify_all()
