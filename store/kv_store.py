"""The store: chunks' KV by key, in RAM and on NVMe, shared through a remote tier (paper §5.1: cheap enough for every chunk)."""

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from cacheblend.base.errors import RemoteError, StoreError, StoreFullError
from cacheblend.base.files import Closing

from .catalog import CatalogEntry, DocumentTable
from .chunk import ChunkKey, ChunkKV
from .config import StoreConfig
from .entry import EncodedEntry
from .layout import StoreFolder
from .nvme_tier import NvmeTier, VerifyReport
from .remote import ObjectFormat, RemoteAddress, RemoteTier
from .tiers import NVME, KVTier, OpenedEntry, Pins, Placement, RamTier, StoreStats, TierStats, read_entry
from .write_queue import DocumentVersion, PendingWrite, WriteQueue

logger = logging.getLogger(__name__)
_MISSES, _FAILED_WRITES = "misses", "failed_writes"


class KVStore(Closing):
    """Keeps chunks' KV in one folder; a context manager. Thread-safe, and several processes may share the folder.

    Every entry is a file on NVMe; RAM holds copies of those used last. Each tier drops
    what was used least recently to stay within its budget; an entry dropped from NVMe is gone. Whatever happens to a file,
    `get` and placements give the bytes that were put, or none: a damaged entry is a miss that is logged, counted and set aside.
    With `StoreConfig.remote`, entries that are written are sent to a remote tier too, in the background, from which `fetch`
    brings them to every store that has it. A remote that does not answer makes misses and no errors.

    Raises:
        MissingExtraError: the remote tier's library is not installed.
        StoreDirectoryError: the directory is not a store, cannot be written, or is of another format.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._closed = True  # until all of it is open
        self.config = config
        self._pins = Pins()
        self._ram = RamTier(config.ram_budget_bytes, self._pins)
        self._remote = self._open_remote()  # connects at its first use
        folder = StoreFolder(Path(config.directory))
        self._nvme = NvmeTier(folder, config.nvme_budget_bytes, self._pins)
        self._queue = WriteQueue(config.write_queue_bytes)
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()  # hits by tier, misses, failed writes
        self._closed = False

    def put(self, key: ChunkKey, kv: ChunkKV, flush: bool = True, *, document: DocumentVersion | None = None) -> Future[bool]:
        """Store a chunk's KV. A key that is stored already is only noted as used.

        Args:
            key: the chunk's key; checked against the KV where that knows its model.
            kv: the KV, on any device; not referred to after return.
            flush: return when the entry would outlive a power cut. Otherwise it is readable at once and written in the
                background; blocks only while more than `StoreConfig.write_queue_bytes` wait.
            document: id and version of the ingested document whose chunk it is. The entry is stored only while the store knows
                the document in that version (or, without a namespace, another one has the chunk), and without a namespace it
                belongs to the document from then on.

        Returns:
            The outcome for this entry; done already with `flush`. Its `result()` waits until the entry is written. It is True
            if the entry survives a power cut, and False if the entry or its document was deleted before it was written. It
            raises the errors below if they occur in the background; the entry is then a miss, which is logged and counted.

        Raises:
            InputError: the KV is not the key's, or cannot be stored.
            StoreFullError: the disk is full, or the NVMe budget less what is pinned has no room.
            StoreDirectoryError: the folder cannot be written.
        """
        # 1. What is stored already is used.
        digest = key.digest
        if digest in self._live:
            self._ram.open(digest)
            self._nvme.catalog.touch(digest)
            return _done(True)
        # 2. Encode, and write at once where the caller waits.
        entry = EncodedEntry.from_chunk(key, kv)
        write = PendingWrite(entry, document)
        if flush:
            with self._live.exclusive():  # so that no deletion comes between the entry and what the remote tier is told
                self._write([write])
            return _done(digest in self._nvme)
        # 3. Otherwise queue the entry, readable from now on, and wait while the queue is too long.
        if entry.nbytes > self.config.nvme_budget_bytes:
            above = f"nvme_budget_bytes={self.config.nvme_budget_bytes}; raise it, or split the chunk"
            raise StoreFullError(f"an entry of {entry.nbytes} bytes is larger than {above}")
        waiting = self._enqueue(write)
        assert waiting is not None, "an entry that is new was not discarded"
        return waiting.stored

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """A chunk's KV on the CPU, the caller's own copy; None for a miss. An entry read from NVMe is cached in RAM."""
        self._check_open()
        found = self._open(key.digest)
        if found is not None and (entry := read_entry(*found)) is not None:
            _, tier = found
            self._count(tier.name)
            return entry.chunk(copy=tier.in_memory or self._cache(entry))
        self._count(_MISSES)
        return None

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether NVMe has the key, or will, unless its file is damaged; reads no file and is not a use. See `fetch`."""
        return key.digest in self._queue or key.digest in self._live

    def fetch(self, keys: Iterable[ChunkKey], deadline_s: float) -> int:
        """Fetch entries that nothing but the remote tier has, side by side; returns how many came by the deadline.

        They are readable here as soon as they come. Those under way are stored too, so that a later request finds them.
        """
        self._check_open()
        missing = [key.digest for key in keys if key not in self]
        if self._remote is None or not missing:
            return 0
        arrivals = self._remote.fetch(missing, partial(self._store_copy, self._queue.generation), deadline_s)
        came, _ = wait(arrivals, min(deadline_s, threading.TIMEOUT_MAX))
        return sum(not arrival.cancelled() and arrival.result() for arrival in came)

    def find(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each entry is here or in the remote tier, which is asked for all of the missing ones side by side."""
        missing = {key.digest for key in keys if key not in self}
        if self._remote is not None and missing:
            missing -= self._remote.contains(missing)
        return [key.digest not in missing for key in keys]

    def share(self, keys: Iterable[ChunkKey]) -> list[ChunkKey]:
        """Send the remote tier what waits, then those of some entries that it lacks; returns the keys that neither side has.

        Raises:
            RemoteError: there is no remote tier, or it refuses an entry, or does not answer.
        """
        self._check_open()
        if self._remote is None:
            raise RemoteError("the store has no remote tier")
        keys = list(dict.fromkeys(keys))
        self._remote.drain()
        there = self._remote.contains(key.digest for key in keys)
        lost: list[ChunkKey] = []
        for key in (key for key in keys if key.digest not in there):
            if (entry := self._nvme.load(key.digest)) is None:
                lost.append(key)
            else:
                self._remote.send(entry)
        return lost

    @contextmanager
    def pin(self, keys: Iterable[ChunkKey]) -> Iterator[list[Placement | None]]:
        """Spare entries from eviction, and yield a placement for each key, in order, or None for a miss.

        No budget evicts them until the block ends; `delete` and other processes may remove them, which leaves the placements
        readable. Entries that were read from NVMe are copied to RAM in the background after the block if that is worth it; see
        `RamTier.admits`.
        """
        self._check_open()
        digests = [key.digest for key in keys]
        with self._pins.hold(digests), ExitStack() as ends:
            placements: list[Placement | None] = []
            for digest in digests:
                found = self._open(digest)
                self._count(_MISSES if found is None else found[1].name)
                if (placement := None if found is None else Placement(*found)) is not None:
                    ends.callback(placement.release)
                placements.append(placement)
            yield placements
        read = {placed.key.digest: placed.nbytes for placed in placements if placed is not None and placed.tier == NVME}
        if wanted := [digest for digest, nbytes in read.items() if self._ram.admits(digest, nbytes)]:
            self._queue.offer(partial(self._promote, wanted))

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry, pinned or not, for every process; False where there was none here.

        The remote tier deletes in the background, in a few attempts; an entry that outlasts them and this process stays there.
        """
        with self._live.exclusive():
            waits = key.digest in self._queue
            removed = self._nvme.remove([key.digest])
            self._forget_gone([key.digest])
        return bool(removed) or waits

    def exclusive(self) -> AbstractContextManager[None]:
        """Exclude all other threads and processes that change this store; re-entrant.

        Use it for outside changes that must be consistent with one of the store's: every writer waits meanwhile.
        """
        return self._live.exclusive()

    @property
    def documents(self) -> DocumentTable:
        return DocumentTable(self._live, self._forget_gone)

    @property
    def has_remote(self) -> bool:
        return self._remote is not None

    def ls(self) -> list[CatalogEntry]:
        """Every entry on NVMe, the least recently used first."""
        return sorted(self._live.catalog.entries(), key=lambda row: (row.used_ns, row.key.digest))

    def verify(self, *, repair: bool = False, on_progress: Callable[[int, int], None] = lambda *_: None) -> VerifyReport:
        """Check every file, header, layer and row; with `repair`, repair what can be. See `VerifyReport`.

        `on_progress` is called with entries done and entries in all.
        """
        report = self._live.verify(repair=repair, on_progress=on_progress)
        if repair:
            self._forget(self._nvme.shrink())
        return report

    def stats(self) -> StoreStats:
        """Contents of the tiers, and hits, misses and evictions since this object was made."""
        self._check_open()
        counts, tiers = self._counts, tuple[KVTier, ...]((self._ram, self._nvme))
        ram, nvme = (TierStats(*one.size(), one.budget_bytes, counts[one.name], one.evictions) for one in tiers)
        remote = None if self._remote is None else self._remote.stats()
        return StoreStats(ram, nvme, counts[_MISSES], self._nvme.damaged, *self._queue.size(), counts[_FAILED_WRITES], remote)

    def flush(self) -> None:
        """Wait until the entries that were put or fetched before are on NVMe, or have failed: see what `put` returned."""
        self._check_open()
        self._queue.flush()

    def flush_remote(self, timeout_s: float | None = None) -> bool:
        """Wait until the remote tier has what was put before, or was given up; False after the time. See `RemoteStats`."""
        self.flush()
        return self._remote is None or self._remote.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, and close. A second call does nothing.

        An entry that cannot be written is a miss at the next opening: that is logged, and the future of its `put` has the
        error.
        """
        if self._closed:
            return
        self._closed = True
        if self._remote is not None:
            self._remote.stop_fetching()
        try:
            self._queue.close()
            self._nvme.catalog.save_uses()
        except StoreError as error:  # a full disk, say: entries go in a slightly older order
            logger.warning("the last times of use are not kept: %s", error)
        finally:
            self._close_tiers()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"the store at {self.config.directory} was not closed; use `with`", ResourceWarning, 2, self)
            self._queue.stop()
            self._close_tiers()

    def _close_tiers(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._nvme.close()

    def _open_remote(self) -> RemoteTier | None:
        config = self.config
        if config.remote is None:
            return None
        address = RemoteAddress(config.remote)
        if (secret := config.read_secret()) is None:
            logger.warning("no secret is set for the remote tier at %s: who can write there can change answers", address.shown)
        backend = address.open(config.remote_timeout_s, limit_bytes=config.nvme_budget_bytes)
        objects = ObjectFormat(secret, config.remote_tenant)
        return RemoteTier(address, backend, objects, config.remote_timeout_s)

    def _store_copy(self, since: int, entry: EncodedEntry) -> bool:
        """Store an entry that came from the remote tier, unless it was deleted after a generation of the queue."""
        if entry.nbytes > self.config.nvme_budget_bytes:
            return False
        return self._enqueue(PendingWrite(entry, is_copy=True), since) is not None

    def _enqueue(self, write: PendingWrite, since: int | None = None) -> PendingWrite | None:
        """Queue an entry, readable from now on, and wait while the queue is too long; see `WriteQueue.add`."""
        waiting = self._queue.add(write, self._write_waiting, since)
        if waiting is write:
            self._cache(write.entry)
            self._queue.wait_for_room()
        return waiting

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store at {self.config.directory} is closed")

    @property
    def _live(self) -> NvmeTier:
        self._check_open()
        return self._nvme

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    def _open(self, digest: str) -> OpenedEntry | None:
        """The entry in RAM or on NVMe, noted as used; None for a miss. One that waits is RAM's."""
        waiting = self._queue.get(digest)
        if (entry := self._ram.open(digest) or waiting) is None:
            file = self._nvme.open(digest)
            return None if file is None else (file, self._nvme)
        if waiting is None and digest not in self._queue and digest not in self._nvme:  # another process has removed it
            self._ram.discard(digest)
            return None
        self._nvme.catalog.touch(digest)
        return entry, self._ram

    def _cache(self, entry: EncodedEntry) -> bool:
        """Copy an entry to RAM; whether that holds it."""
        digest = entry.info.key.digest
        held = self._ram.put(entry)
        # Looked up after it is there: whoever removed the entry before that did not find the copy to drop.
        if digest not in self._queue and digest not in self._nvme:
            self._ram.discard(digest)
        return held

    def _forget(self, digests: Sequence[str]) -> None:
        """Let go of what waits to be written, and of the copy, made and to be made."""
        self._queue.discard(digests)
        for digest in digests:
            self._ram.discard(digest)

    def _forget_gone(self, digests: Sequence[str], remote: bool = True) -> None:
        """Let go of what was deleted, in the remote tier too unless `remote` is false."""
        if self._remote is not None and remote:
            for digest in digests:  # before `_forget`: no fetch finds it from now on, and what an earlier one brings goes
                self._remote.put(digest, None)
        self._forget(digests)

    def _promote(self, digests: Sequence[str]) -> None:
        for digest in digests:
            if self._closed:
                return
            # The pin was the use: a later one here would put the entry before what was used since.
            if digest not in self._ram and (entry := self._nvme.load(digest)) is not None:
                self._cache(entry)

    def _write(self, writes: Sequence[PendingWrite]) -> None:
        """Write all entries, or none, in one commit; their results are set."""
        for evicted in self._nvme.write(writes):
            self._ram.discard(evicted)
        for write in writes:
            if write.digest in self._nvme:
                self._cache(write.entry)
                if self._remote is not None and not write.is_copy:
                    self._remote.put(write.digest, partial(self._nvme.load, write.digest))
                self._queue.end(write.digest, True)
            else:  # its document is gone
                self._forget([write.digest])

    def _write_waiting(self, first: PendingWrite) -> None:
        """Write an entry that waits, with others; in the queue's thread."""
        try:
            with self._nvme.exclusive():
                self._write_group(self._queue.group())
        except Exception as error:  # the folder is gone, for example: the others of the group meet it too
            self._give_up(first, error)

    def _write_group(self, group: Sequence[PendingWrite]) -> None:
        """Write entries in one commit; where they have no room together, one by one."""
        try:
            if group:
                self._write(group)
        except Exception as error:
            if len(group) == 1:
                self._give_up(group[0], error)
            else:
                for write in group:
                    self._write_group([write])

    def _give_up(self, write: PendingWrite, error: Exception) -> None:
        logger.error("entry %s was not written: %s", write.digest, error)
        self._count(_FAILED_WRITES)
        self._ram.discard(write.digest)
        self._queue.end(write.digest, error)


def _done(stored: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(stored)
    return future
