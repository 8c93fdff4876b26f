"""The store: chunks' KV by key, in RAM, on NVMe and remote (paper §5.1: storage cheap enough to keep every chunk's)."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cacheblend.base.errors import StoreError, StoreFullError

from .catalog import CatalogEntry
from .chunk import ChunkKV
from .config import StoreConfig
from .documents import StoreDocuments
from .entry import EncodedEntry
from .eviction import Pins
from .key import ChunkKey
from .layout import StoreFolder
from .nvme_tier import NvmeTier
from .tiers import CACHE_TIERS, REMOTE, CacheTier, KVTier, OpenedEntry, Placement, StoreStats, TierStats, opening, read_entry
from .verify import VerifyReport, verify
from .write_queue import DocumentVersion, PendingWrite, WriteQueue

if TYPE_CHECKING:
    from .remote.address import RemoteAddress
    from .remote.read_through import ReadThrough
    from .remote.remote_entry import RemoteEntry
    from .remote.remote_tier import RemoteTier

logger = logging.getLogger(__name__)
_MISSES, _FAILED_WRITES = "misses", "failed_writes"


class KVStore:
    """Keeps chunks' KV in one folder; a context manager. Thread-safe, and several processes may share the folder.

    Every entry is a file on NVMe; RAM, and further tiers of the configuration, hold copies of those used last. Each tier drops
    what was used least recently to stay within its budget; an entry dropped from NVMe is gone. Whatever happens to a file,
    `get` and placements give the bytes that were put, or none: a damaged entry is a miss that is logged, counted and set aside.
    With `StoreConfig.remote`, what is written goes to a tier behind NVMe too, in the background, and is found there by every
    store that has it. A remote that is away makes misses, and nothing waits for it longer than its time-out.

    Raises:
        MissingExtraError: the remote tier's library is not installed.
        StoreDirectoryError: the directory is not a store, cannot be written, or is of another format.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._closed = True  # until all of it is open
        self.config = config
        self._pins = Pins()
        *cached, (_, nvme_budget) = config.budgets().items()
        self._caches: tuple[CacheTier, ...] = tuple(CACHE_TIERS[name](budget, self._pins) for name, budget in cached)
        self._remote: ReadThrough | None = None
        folder = StoreFolder(Path(config.directory))
        if (address := config.remote_address()) is not None:
            self._open_remote(address, folder)
        try:
            self._nvme = NvmeTier(folder, nvme_budget, self._pins, direct_reads=config.direct_reads)
        except BaseException:
            self._close_remote()
            raise
        self._tiers: tuple[KVTier, ...] = (*self._caches, self._nvme)
        self._queue = WriteQueue()
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()  # hits by tier, misses, failed writes
        self._closed = False

    def put(self, key: ChunkKey, kv: ChunkKV, flush: bool = True, *, document: DocumentVersion | None = None) -> Future[bool]:
        """Store a chunk's KV. A key that is stored already is only noted as used.

        Args:
            key: the chunk's key; checked against the KV where that knows its model.
            kv: the KV, on any device; not referred to after return.
            flush: return when the entry would outlive a power cut. Otherwise it is readable at once and written in the
                background; blocks only while more than 512 MiB wait.
            document: id and version of the ingested document whose chunk it is. The entry is stored only while the store knows
                the document in that version (or, without a namespace, another one has the chunk), and without a namespace it
                belongs to the document from then on.

        Returns:
            What became of this entry alone; done already with `flush`. Its `result()` waits until the entry is written. It is
            True where it would outlive a power cut, and False where it was deleted before it was written, or its document was.
            It raises what follows where the background met it; the entry is then a miss, which is logged and counted.

        Raises:
            InputError: the KV is not the key's, or cannot be stored.
            StoreFullError: the disk is full, or the NVMe budget less what is pinned has no room.
            StoreDirectoryError: the folder cannot be written.
        """
        self._check_open()
        # 1. What is stored already is used.
        digest = key.digest
        if digest in self._nvme:
            for tier in self._caches:
                tier.open(digest)
            self._nvme.catalog.touch(digest)
            return _done(True)
        # 2. Encode, and write at once where the caller waits.
        entry = EncodedEntry.of(key, kv)
        write = PendingWrite(entry, document)
        if flush:
            self._write([write])
            return _done(digest in self._nvme)
        # 3. Otherwise queue the entry, readable from now on, and wait while the queue is too long.
        if entry.nbytes > self.config.nvme_budget_bytes:
            raise StoreFullError(
                f"an entry of {entry.nbytes} bytes is larger than nvme_budget_bytes={self.config.nvme_budget_bytes}; "
                "raise the budget or split the chunk"
            )
        if (waiting := self._queue.add(write, self._write_waiting)) is write:
            self._cache(entry)
            self._queue.wait_for_room()
        return waiting.stored

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """A chunk's KV on the CPU, the caller's own copy; None for a miss. An entry read from NVMe is cached in RAM."""
        self._check_open()
        since = self._queue.time()
        (found,) = self._open_all([key.digest])
        if found is not None and (entry := read_entry(*found)) is not None:
            _, tier = found
            self._count(tier.name)
            if self._remote is not None and tier.name == REMOTE and self._remote.admits(key.digest, entry.nbytes):
                self._remote.offer(entry.nbytes, lambda: entry, since)
                return entry.chunk(copy=True)
            return entry.chunk(copy=tier.in_memory or (tier.name != REMOTE and self._cache(entry)))
        self._count(_MISSES)
        return None

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether NVMe has the key, or will, unless its file is damaged; reads no file and is not a use. See `fetch`."""
        self._check_open()
        return key.digest in self._queue or key.digest in self._nvme

    def fetch(self, keys: Iterable[ChunkKey]) -> int:
        """Copy entries that the remote tier has and NVMe does not, durable on return; gives how many.

        Raises:
            StoreFullError: the disk is full, or the NVMe budget less what is pinned has no room.
            StoreDirectoryError: the folder cannot be written.
        """
        self._check_open()
        missing = [key.digest for key in keys if key not in self]
        if self._remote is None or not missing:
            return 0
        return self.store_copies(self._remote.tier.load_all(missing))

    def store_copies(self, entries: Iterable[EncodedEntry]) -> int:
        """Store entries of the remote tier, durable on return; gives how many. Raises as `fetch` does."""
        results, stored = deque[Future[bool]](), 0  # not the writes: each holds its entry, as an error's traceback does
        since = self._queue.time()
        for entry in entries:
            with self._nvme.exclusive():
                if not self._queue.was_discarded(entry.info.key.digest, since):
                    results.append(self._queue.add(PendingWrite(entry, is_copy=True), self._write_waiting).stored)
            self._queue.wait_for_room()
            while results and results[0].done():
                stored += results.popleft().result()
        return stored + sum(result.result() for result in results)

    def load(self, key: ChunkKey) -> EncodedEntry | None:
        """An entry of NVMe as it is stored, which is no use of it; None for a miss."""
        self._check_open()
        return self._nvme.load(key.digest, is_use=False)

    @contextmanager
    def pin(self, keys: Iterable[ChunkKey], *, remote: bool = True) -> Iterator[list[Placement | None]]:
        """Spare entries from eviction, and give a placement for each key, in order, or None for a miss.

        No budget evicts them until the block ends; `delete` and other processes may remove them, which leaves the placements
        readable. Entries that were read from a slow tier are copied to faster ones in the background after the block where that
        is worth it; see `CacheTier.admits` and `ReadThrough`. Those of the remote tier stay there by its own rules: reading one
        may raise `RemoteError`.

        Args:
            keys: the entries'.
            remote: whether to look into the remote tier for what is not here.
        """
        self._check_open()
        digests = [key.digest for key in keys]
        placements: list[Placement | None] = []
        copies: dict[str, RemoteEntry] = {}
        since = self._queue.time()
        with self._pins.hold(digests):
            try:
                for found in self._open_all(digests, remote=remote, copies=copies):
                    self._count(_MISSES if found is None else found[1].name)
                    placements.append(None if found is None else self._placement(found))
                yield placements
            finally:
                placed = [placement for placement in placements if placement is not None]
                for placement in placed:
                    placement.release()
                for entry in copies.values():
                    assert self._remote is not None, "only its entries are copied"
                    self._remote.offer(entry.info.nbytes, entry.load, since)
        local = [placement for placement in placed if placement.tier != REMOTE]
        if wanted := [placement.key.digest for placement in local if self._is_worth_a_copy(placement)]:
            self._queue.offer(partial(self._promote, wanted))

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry, pinned or not, for every process; False where there was none here.

        The remote tier is told in the background, and again until it answers, also by the next process.
        """
        self._check_open()
        with self._nvme.exclusive():
            waits = key.digest in self._queue
            removed = self._nvme.remove([key.digest])
            self._forget_everywhere([key.digest])
        return bool(removed) or waits

    def clear(self) -> None:
        """Remove every entry, pinned ones and those of other processes too, and the files that were set aside.

        Documents stay known, so that what is stored of them later is still pinned, and dropped with them. The remote tier keeps
        what it has.
        """
        self._check_open()
        with self._nvme.exclusive():
            self._queue.discard()
            self._nvme.clear()
            for tier in self._caches:
                tier.clear()

    def exclusive(self) -> AbstractContextManager[None]:
        """Alone among the threads and processes that change this store; re-entrant. For changes beside it that belong together
        with one of its own: whoever holds it keeps every writer waiting.
        """
        self._check_open()
        return self._nvme.exclusive()

    def release_reserve(self) -> bool:
        """Give up the room on the disk that is reserved for removals, for a removal beside this store; False if it is gone."""
        self._check_open()
        return self._nvme.release_reserve()

    @property
    def documents(self) -> StoreDocuments:
        """The documents that the chunks belong to."""
        self._check_open()
        return StoreDocuments(self._nvme, self._forget_everywhere)

    @property
    def remote(self) -> RemoteTier | None:
        """The remote tier; None where the configuration has none."""
        self._check_open()
        return None if self._remote is None else self._remote.tier

    def ls(self) -> list[CatalogEntry]:
        """Every entry on NVMe, the least recently used first."""
        self._check_open()
        return list(self._nvme.catalog.entries())

    def verify(self, *, repair: bool = False, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Check every file, header, layer and row; with `repair`, repair what can be. See `VerifyReport`.

        Args:
            repair: change what is wrong.
            on_progress: called with entries done and entries in all.
        """
        self._check_open()
        report = verify(self._nvme, repair=repair, on_progress=on_progress)
        if repair:
            self._forget(self._nvme.shrink())
        return report

    def stats(self) -> StoreStats:
        """What the tiers hold, and hits, misses and evictions since this object was made."""
        self._check_open()
        counts = self._counts
        tiers = {one.name: TierStats(*one.size(), one.budget.bytes, counts[one.name], one.evictions) for one in self._tiers}
        remote = None if self._remote is None else self._remote.tier.stats()
        return StoreStats(tiers, counts[_MISSES], self._nvme.damaged, *self._queue.size(), counts[_FAILED_WRITES], remote)

    def flush(self) -> None:
        """Wait until what was put before is on NVMe, or has failed: what `put` returned tells which.

        Waits for copies of what was read from the remote tier, too.
        """
        self._check_open()
        if self._remote is not None:
            self._remote.flush()
        self._queue.flush()

    def flush_remote(self, timeout_s: float | None = None) -> bool:
        """Wait until the remote tier has what was put before, or was given up; False after the time. See `RemoteStats`."""
        self.flush()
        return self._remote is None or self._remote.tier.uploads.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, and close. A second call does nothing.

        An entry that cannot be written is a miss at the next opening: that is logged, and told by what its `put` returned.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.close()
            self._nvme.catalog.save_uses()
        except StoreError as error:  # a full disk, say: entries go in a slightly older order
            logger.warning("the last times of use are not kept: %s", error)
        finally:
            self._close_tiers()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"the store at {self.config.directory} was not closed; use `with`", ResourceWarning, 2, self)
            self._queue.stop()
            self._close_tiers()

    def _close_tiers(self) -> None:
        self._close_remote()
        for tier in self._tiers:
            tier.close()

    def _close_remote(self) -> None:
        if self._remote is not None:
            self._remote.close(self.config.remote_timeout_s)

    def _open_remote(self, address: RemoteAddress, folder: StoreFolder) -> None:
        from .remote.read_through import ReadThrough  # not loaded where there is no remote tier
        from .remote.remote_tier import RemoteTier

        budget_bytes = self.config.nvme_budget_bytes
        tier = RemoteTier(address, self.config, folder.removals)

        def has_room(nbytes: int) -> bool:
            return self._nvme.size()[1] + nbytes <= budget_bytes

        self._remote = ReadThrough(tier, self._store_copy, has_room, budget_bytes)

    def _open_all(
        self, digests: Sequence[str], *, remote: bool = True, copies: dict[str, RemoteEntry] | None = None
    ) -> list[OpenedEntry | None]:
        """Each entry in the fastest tier that has it; `copies` gets those that are to be copied from the remote tier."""
        with opening(digests, self._open) as opened:
            missing = [digest for digest, found in zip(digests, opened, strict=True) if found is None]
            if self._remote is None or not remote or not missing:
                return opened
            there = self._remote.tier.open_all(missing)
            for digest, entry in there.items():
                if copies is not None and self._remote.admits(digest, entry.info.nbytes):
                    entry.keep()
                    copies[digest] = entry
            return [
                (there[digest], self._remote.tier) if found is None and digest in there else found
                for digest, found in zip(digests, opened, strict=True)
            ]

    def _placement(self, found: OpenedEntry) -> Placement:
        (entry, tier), remote = found, self.remote
        return Placement(entry, tier, remote.open_stream if remote is not None and tier is remote else None)

    def _store_copy(self, entry: EncodedEntry, since: int) -> None:
        """Write what was read from the remote tier to the tiers here, unless it was deleted since it was looked up."""
        with self._nvme.exclusive():
            if not self._queue.was_discarded(entry.info.key.digest, since):
                self._write([PendingWrite(entry, is_copy=True)])

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store at {self.config.directory} is closed")

    def _count(self, name: str) -> None:
        with self._counting:
            self._counts[name] += 1

    def _open(self, digest: str) -> OpenedEntry | None:
        """The entry in the fastest tier that has it, noted as used; None for a miss. One that waits is the first tier's."""
        waiting = self._queue.get(digest)
        for tier in self._caches:
            if (entry := tier.open(digest) or waiting) is None:
                continue
            if waiting is None and digest not in self._nvme:  # another process has removed it
                entry.close()
                self._forget([digest])
                return None
            self._nvme.catalog.touch(digest)
            return entry, tier
        file = self._nvme.open(digest)
        return None if file is None else (file, self._nvme)

    def _cache(self, entry: EncodedEntry) -> bool:
        """Copy an entry to the tiers before NVMe; whether any of them holds it."""
        digest = entry.info.key.digest
        held = [tier.put(entry) for tier in self._caches]
        # Looked up after it is there: whoever removed the entry before that did not find the copies to drop.
        if digest not in self._queue and digest not in self._nvme:
            self._uncache(digest)
        return any(held)

    def _uncache(self, digest: str) -> None:
        for tier in self._caches:
            tier.discard(digest)

    def _forget(self, digests: Iterable[str]) -> None:
        """Let go of what waits to be written, and of copies, made and to be made."""
        for digest in digests:
            self._queue.discard([digest])
            self._uncache(digest)

    def _forget_everywhere(self, digests: Iterable[str]) -> None:
        """Let go of what was deleted, in the remote tier too."""
        digests = list(digests)
        self._forget(digests)
        if self._remote is not None:
            self._remote.tier.delete(digests)

    def _is_worth_a_copy(self, placement: Placement) -> bool:
        """Whether a tier before the one that a placement was read from admits the entry; each of them notes the read."""
        faster = self._caches[: [tier.name for tier in self._tiers].index(placement.tier)]
        return bool([tier for tier in faster if tier.admits(placement.key.digest, placement.nbytes)])

    def _promote(self, digests: Sequence[str]) -> None:
        for digest in digests:
            if self._closed:
                return
            # The pin was the use: a later one here would put the entry before what was used since.
            if digest not in self._caches[0] and (entry := self._nvme.load(digest, is_use=False)) is not None:
                self._cache(entry)

    def _write(self, writes: Sequence[PendingWrite]) -> None:
        """Write all entries, or none, in one commit; their results are set."""
        for evicted in self._nvme.write(writes):
            self._uncache(evicted)
        for write in writes:
            if write.digest in self._nvme:
                self._cache(write.entry)
                if self._remote is not None and not write.is_copy:
                    self._remote.tier.put(write.entry)
                self._queue.end(write.digest, True)
            else:  # its document is gone
                self._forget([write.digest])

    def _write_waiting(self, first: PendingWrite) -> None:
        """Write an entry that waits, with others; in the queue's thread."""
        group = [first]
        try:
            with self._nvme.exclusive():
                group = self._queue.group(first)
                try:
                    if group:
                        self._write(group)
                except Exception:  # what has no room together may have it one by one
                    for write in group:
                        try:
                            self._write([write])
                        except Exception as error:
                            self._give_up(write, error)
        except Exception as error:  # not of one entry: the folder is gone, say
            for write in group:
                self._give_up(write, error)

    def _give_up(self, write: PendingWrite, error: Exception) -> None:
        logger.error("entry %s was not written: %s", write.digest, error)
        self._count(_FAILED_WRITES)
        self._uncache(write.digest)
        self._queue.end(write.digest, error)


def _done(stored: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(stored)
    return future
