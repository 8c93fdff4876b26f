"""The store: chunks' KV by key, in RAM over NVMe (paper §5.1: KV on storage cheap enough to keep every chunk's)."""

from __future__ import annotations

import dataclasses
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

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
from .placement import Placement
from .ram_tier import RamTier
from .verify import VerifyReport, verify
from .write_queue import Background, DocumentVersion, PendingEntries, PendingWrite, write_group

Event = Literal["ram_hit", "nvme_hit", "miss", "failed_write"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier: what it holds now, and hits and evictions since the store was opened by this process."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int
    evictions: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's tiers, and what happened since it was opened by this process.

    Args:
        ram: copies in RAM; its hits include entries that wait to be written.
        nvme: entries on NVMe, whichever process wrote them.
        misses: keys that `get` and `pin` did not find.
        damaged: entries that were set aside.
        pending_writes: entries that wait to be written in the background.
        pending_bytes: their bytes.
        failed_writes: entries that the background could not write.

    """

    ram: TierStats
    nvme: TierStats
    misses: int
    damaged: int
    pending_writes: int
    pending_bytes: int
    failed_writes: int

    def as_dict(self) -> dict[str, object]:
        """Plain numbers and dicts, for JSON."""
        return dataclasses.asdict(self)


class Events:
    """Counts what happens in a store; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, event: Event) -> None:
        """One more of them."""
        with self._lock:
            self._counts[event] += 1

    def __getitem__(self, event: Event) -> int:
        return self._counts[event]


logger = logging.getLogger(__name__)


class KVStore:
    """Keeps chunks' KV in one folder; a context manager. Thread-safe, and several processes may share the folder.

    Every entry is a file on NVMe; RAM holds copies of those used last. Each tier drops what was used least recently to stay
    within its budget; an entry dropped from NVMe is gone. Whatever happens to a file, `get` and placements give the bytes
    that were put, or none: a damaged entry is a miss that is logged, counted and set aside.

    Raises:
        StoreDirectoryError: the directory is not a store, cannot be written, or is of another format.

    """

    def __init__(self, config: StoreConfig) -> None:
        self._closed = True  # until all of it is open
        self.config = config
        self._pins = Pins()
        ram_budget, nvme_budget = config.budgets()
        self._ram = RamTier(ram_budget, self._pins)
        self._nvme = NvmeTier(StoreFolder(Path(config.directory)), nvme_budget, self._pins, direct_reads=config.direct_reads)
        self._background = Background(config.queue_bytes)
        self._events = Events()
        self._pending = PendingEntries()
        self._closed = False

    def put(self, key: ChunkKey, kv: ChunkKV, flush: bool = True, *, document: DocumentVersion | None = None) -> Future[bool]:
        """Store a chunk's KV. A key that is stored already is only noted as used.

        Args:
            key: the chunk's key; checked against the KV where that knows its model.
            kv: the KV, on any device; not referred to after return.
            flush: return when the entry would outlive a power cut. Otherwise it is readable at once and written in the
                background; blocks only while more than `queue_bytes` wait.
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
        digest = key.digest
        if digest in self._nvme:
            self._ram.get(digest)
            self._nvme.catalog.touch(digest)
            return _done(True)
        entry = EncodedEntry.of(key, kv)
        write = PendingWrite(entry, document)
        if flush:
            self._write([write])
            return _done(digest in self._nvme)
        if entry.nbytes > self.config.nvme_budget_bytes:
            raise StoreFullError(
                f"an entry of {entry.nbytes} bytes is larger than nvme_budget_bytes={self.config.nvme_budget_bytes}; "
                "raise the budget or split the chunk"
            )
        if (waiting := self._pending.add(write)) is not write:
            return waiting.stored
        try:
            self._keep_in_ram(entry)
            self._background.submit(partial(self._write_pending, write), entry.nbytes)
        except BaseException:
            self._forget([digest])
            raise
        return write.stored

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """A chunk's KV on the CPU, the caller's own copy; None for a miss. An entry read from NVMe is kept in RAM."""
        self._check_open()
        if (entry := self._in_ram(key.digest)) is not None:
            return entry.chunk(copy=True)
        if (entry := self._nvme.load(key.digest)) is not None:
            self._events.count("nvme_hit")
            return entry.chunk(copy=self._keep_in_ram(entry))
        self._events.count("miss")
        return None

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether `get` would find the key, unless its file is damaged; reads no file and is not a use."""
        self._check_open()
        return key.digest in self._pending or key.digest in self._nvme

    @contextmanager
    def pin(self, keys: Iterable[ChunkKey]) -> Iterator[list[Placement | None]]:
        """Keep entries where they are, and tell where: a placement for each key, in order, or None for a miss.

        No budget evicts them until the block ends; `delete` and other processes may remove them, which leaves the placements
        readable. Entries that were on NVMe are copied to RAM in the background after the block where that is worth it; see
        `RamTier.wants`.
        """
        self._check_open()
        keys = list(keys)
        placements: list[Placement | None] = []
        with self._pins.hold([key.digest for key in keys]):
            try:
                for key in keys:
                    placements.append(self._place(key.digest))
                yield placements
            finally:
                placed = [placement for placement in placements if placement is not None]
                for placement in placed:
                    placement.release()
        read = [placement for placement in placed if placement.tier == "nvme"]
        if wanted := [one.key.digest for one in read if self._ram.wants(one.key.digest, one.nbytes)]:
            self._background.offer(partial(self._promote, wanted))

    def delete(self, key: ChunkKey) -> bool:
        """Remove an entry, pinned or not, for every process; False where there was none."""
        self._check_open()
        with self._nvme.exclusive():
            pending = self._pending.get(key.digest)
            removed = self._nvme.remove([key.digest])
            self._forget([key.digest])
        return bool(removed) or pending is not None

    def clear(self) -> None:
        """Remove every entry, pinned ones and those of other processes too, and the files that were set aside.

        Documents stay known, so that what is stored of them later is still pinned, and dropped with them.
        """
        self._check_open()
        with self._nvme.exclusive():
            self._pending.clear()
            self._nvme.clear()
            self._ram.clear()

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
        return StoreDocuments(self._nvme, self._forget)

    def ls(self) -> list[CatalogEntry]:
        """Every entry on NVMe, the least recently used first."""
        self._check_open()
        return list(self._nvme.catalog.entries())

    def verify(self, *, repair: bool = False, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Check every file, header, layer and row; with `repair`, mend what can be mended. See `VerifyReport`.

        Args:
            repair: mend.
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
        entries, total_bytes = self._nvme.catalog.totals()
        ram, nvme = self._ram, self._nvme
        pending, pending_bytes = self._pending.size()
        return StoreStats(
            ram=TierStats(len(ram), ram.bytes, ram.budget.bytes, self._events["ram_hit"], ram.evictions),
            nvme=TierStats(entries, total_bytes, nvme.budget.bytes, self._events["nvme_hit"], nvme.evictions),
            misses=self._events["miss"],
            damaged=nvme.damaged,
            pending_writes=pending,
            pending_bytes=pending_bytes,
            failed_writes=self._events["failed_write"],
        )

    def flush(self) -> None:
        """Wait until what was put before is on NVMe, or has failed: what `put` returned tells which."""
        self._check_open()
        self._background.flush()

    def close(self) -> None:
        """Write what waits, and close. A second call does nothing.

        An entry that cannot be written is a miss at the next opening: that is logged, and told by what its `put` returned.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._background.close()
            self._nvme.catalog.save_uses()
        except StoreError as error:  # a full disk, say: entries go in a slightly older order
            logger.warning("the last times of use are not kept: %s", error)
        finally:
            self._nvme.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            warnings.warn(f"the store at {self.config.directory} was not closed; use `with`", ResourceWarning, 2, self)
            self._background.stop()
            self._nvme.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store at {self.config.directory} is closed")

    def _in_ram(self, digest: str) -> EncodedEntry | None:
        """The entry in RAM or on its way to NVMe, counted as a hit and a use."""
        pending, entry = self._pending.get(digest), self._ram.get(digest)
        if pending is None and entry is not None and digest not in self._nvme:  # another process has removed it
            self._ram.discard(digest)
            return None
        if (entry := entry or pending) is not None:
            self._events.count("ram_hit")
            self._nvme.catalog.touch(digest)
        return entry

    def _place(self, digest: str) -> Placement | None:
        if (entry := self._in_ram(digest)) is not None:
            return Placement(entry, self._set_aside)
        if (file := self._nvme.open(digest)) is None:
            self._events.count("miss")
            return None
        self._events.count("nvme_hit")
        return Placement(file, self._set_aside)

    def _forget(self, digests: Iterable[str]) -> None:
        """Let go of what waits to be written, and of copies in RAM."""
        for digest in digests:
            self._pending.discard([digest])
            self._ram.discard(digest)

    def _set_aside(self, digest: str, layer: int) -> None:
        self._nvme.set_aside(digest, [layer])

    def _promote(self, digests: Sequence[str]) -> None:
        for digest in digests:
            if self._closed:
                return
            if digest not in self._ram and (entry := self._nvme.load(digest)) is not None:
                self._keep_in_ram(entry)

    def _keep_in_ram(self, entry: EncodedEntry) -> bool:
        digest = entry.info.key.digest
        kept = self._ram.put(digest, entry)
        # Looked up after it is in RAM: whoever removed the entry before that did not find the copy to drop.
        if digest not in self._pending and digest not in self._nvme:
            self._ram.discard(digest)
        return kept

    def _write(self, writes: Sequence[PendingWrite]) -> None:
        for evicted in self._nvme.write(writes):
            self._ram.discard(evicted)
        for write in writes:
            if write.digest in self._nvme:
                self._keep_in_ram(write.entry)
                self._pending.end(write.digest, True)
            else:  # its document is gone
                self._forget([write.digest])

    def _write_pending(self, write: PendingWrite) -> None:
        if write.digest not in self._pending:
            return  # written with others, deleted, or given up, while it waited
        group = [write]
        try:
            with self._nvme.exclusive():
                group = self._pending.group(write)
                if group:
                    write_group(group, self._write, self._give_up)
        except Exception as error:  # not of one entry: the folder is gone, say
            for one in group:
                self._give_up(one, error)

    def _give_up(self, write: PendingWrite, error: Exception) -> None:
        logger.error("entry %s was not written: %s", write.digest, error)
        self._events.count("failed_write")
        self._ram.discard(write.digest)
        self._pending.end(write.digest, error)


def _done(stored: bool) -> Future[bool]:
    future: Future[bool] = Future()
    future.set_result(stored)
    return future
