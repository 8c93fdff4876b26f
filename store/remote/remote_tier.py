"""The remote tier: entries that several machines share, behind NVMe. Looked up in one round trip, read layer by layer."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from cacheblend.base.errors import DamagedEntryError, EvictedEntryError, RemoteError
from cacheblend.base.memory import Bytes
from cacheblend.base.threads import DaemonThreads
from cacheblend.store.config import StoreConfig
from cacheblend.store.entry import EncodedEntry

from .address import RemoteAddress
from .backend import BackendLimits, ObjectRange, RangeReader
from .breaker import CircuitBreaker
from .object_format import PREFIX_BYTES, ObjectFormat, ObjectLayout
from .remote_entry import RemoteEntry
from .removal_log import RemovalLog
from .speed import RemoteSpeed, SpeedMeter, StreamClock
from .stream import RemoteStream
from .upload_queue import UploadQueue

logger = logging.getLogger(__name__)
T = TypeVar("T")
THREADS = DaemonThreads("cacheblend-remote")
MAX_LAYOUTS = 4096
LAYOUT_S = 60.0  # for which an entry's header is taken to be as it was
MISSING_S = 60.0  # for which an entry whose bytes were wrong, or that went, is not looked up again
MAX_MISSING = 65_536
LATENCY_BYTES = 2**20  # of a layer at most: larger ranges are entries, whose first tells more of the throughput
LOAD_ENTRIES, LOAD_BYTES = 64, 64 * 2**20  # that are asked for together
LOOKUPS, MIN_PATIENCE_S = 8, 0.05  # a look-up's next answer is given so many times what the last one's first took, and this


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """A remote tier since the store was opened by this process.

    Args:
        state: of the breaker of reads: "closed" (it is asked), "open" (its entries are misses for a while), "half open".
        hits: entries that requests found there.
        misses: entries that were looked up and not there.
        failures: calls that it refused, or did not answer in time.
        damaged: entries whose bytes were not what was written.
        read_bytes: bytes that came.
        sent: entries that were written.
        sent_bytes: their bytes.
        dropped_writes: changes that were not made: the remote was away, or too many waited.
        pending_writes: changes that wait.
        latency_s: measured seconds to the first byte; None before the first read.
        bytes_per_s: measured throughput; None likewise.
    """

    state: str
    hits: int
    misses: int
    failures: int
    damaged: int
    read_bytes: int
    sent: int
    sent_bytes: int
    dropped_writes: int
    pending_writes: int
    latency_s: float | None
    bytes_per_s: float | None

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


class RemoteTier:
    """Entries on a server or in an object store. Thread-safe; nothing here is taken for granted.

    A remote that is away, slow or full makes misses and no errors: look-ups are bounded in time, and a `CircuitBreaker` ends
    calls that fail again and again. Bytes are checked before they are used, and wrong ones are a miss.

    Args:
        address: where it is.
        config: of the store: time-out, time to live, tenant, secret, and the bytes of entries that wait to be written.
        removals: the file of a `RemovalLog`.
    """

    name: ClassVar[str] = "remote"
    in_memory: ClassVar[bool] = False

    def __init__(self, address: RemoteAddress, config: StoreConfig, removals: Path) -> None:
        self.address, self.format = address, ObjectFormat(config.read_secret(), config.remote_tenant)
        self._limits = BackendLimits(timeout_s=config.remote_timeout_s, ttl_s=config.remote_ttl_s)
        self.backend = address.open(self._limits)
        self.reads, self.writes = CircuitBreaker(), CircuitBreaker()
        self.meter = SpeedMeter()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._layouts: OrderedDict[str, tuple[ObjectLayout, float]] = OrderedDict()
        self._missing: OrderedDict[str, float] = OrderedDict()
        self._lookup_s: float | None = None
        self.uploads = UploadQueue(self._send, self._remove, self.writes, config.remote_queue_bytes, RemovalLog(removals))

    def open_all(self, digests: Sequence[str]) -> dict[str, RemoteEntry]:
        """The entries among these that are there, looked up in one round trip (headers over 16 KiB take a second)."""
        wanted = [digest for digest in dict.fromkeys(digests) if not self._is_out(digest)]
        found = {digest: layout for digest in wanted if (layout := self._known(digest)) is not None}
        missing = [digest for digest in wanted if digest not in found]
        if missing and self.reads.allows():
            try:
                with self._guarding():
                    found |= self._look_up(missing)
            except RemoteError:
                found.clear()
        elif missing:
            found.clear()
        self._count("hits", len(found))
        self._count("misses", len(wanted) - len(found))
        return {digest: RemoteEntry(self, found[digest]) for digest in wanted if digest in found}

    def contains(self, digests: Sequence[str]) -> set[str]:
        """Those of the entries that are there, by a round trip for `LOAD_ENTRIES`; none where the remote does not answer.

        Takes a time-out at most, in all: where there is no time for another round trip, the rest is not looked up.
        """
        asked = [digest for digest in dict.fromkeys(digests) if not self._is_out(digest)]
        if not asked or not self.reads.allows():
            return set()
        sizes: list[int | None] = []
        left_s, took_s = self._limits.timeout_s, 0.0
        try:
            with self._guarding():
                while len(sizes) < len(asked) and left_s > took_s:
                    started = time.monotonic()
                    names = [self.format.name(digest) for digest in asked[len(sizes) : len(sizes) + LOAD_ENTRIES]]
                    sizes += self._within(left_s, partial(self.backend.sizes, names))
                    took_s = time.monotonic() - started
                    left_s -= took_s
        except RemoteError:
            return set()
        return {digest for digest, size in zip(asked, sizes, strict=False) if size is not None}

    def open_stream(self) -> RemoteStream:
        """A connection over which layers of several entries come one after the other."""
        return RemoteStream(self)

    def read(self, ranges: Sequence[ObjectRange]) -> list[Bytes | None]:
        """Whole ranges, with nobody waiting for each; raises `RemoteError`."""
        if not self.reads.allows():
            raise RemoteError(f"the remote tier at {self.address} is not asked for a while, since it did not answer")
        opened: list[RangeReader] = []
        largest = max((one.stop - one.start for one in ranges), default=0)

        def receive() -> list[Bytes | None]:
            found: list[Bytes | None] = []
            with self._timing(tells_latency=largest <= LATENCY_BYTES) as clock, self.reader() as reader:
                opened.append(reader)
                reader.request(ranges)
                clock.ask(len(ranges))
                for _ in ranges:
                    found.append(data := reader.receive())
                    clock.answer(0 if data is None else len(data))
            return found

        with self._guarding():
            # The backend ends silence; this, what comes so slowly that it never ends.
            bound_s = self._limits.bound_s(sum(one.stop - one.start for one in ranges))
            found = self._within(bound_s, receive, lambda: _abort(opened))
        self.count_read(sum(len(data) for data in found if data is not None))
        return found

    def count_read(self, count: int) -> None:
        """Note bytes that came."""
        self._count("read_bytes", count)

    def load_all(self, digests: Sequence[str]) -> Iterator[EncodedEntry]:
        """Those of the entries that are there, whole, asked for ahead; ends early where the remote stops answering."""
        for at in range(0, len(digests), LOAD_ENTRIES):
            try:
                yield from self.load_each(list(self.open_all(digests[at : at + LOAD_ENTRIES]).values()))
            except RemoteError:
                return

    def load_each(self, entries: Sequence[RemoteEntry]) -> Iterator[EncodedEntry]:
        """Entries whole, but those that are damaged or gone by now; raises `RemoteError`."""
        left = deque(entries)
        while left:
            group = [left.popleft()]
            while left and sum(entry.info.nbytes for entry in (*group, left[0])) <= LOAD_BYTES:
                group.append(left.popleft())
            for entry, data in zip(group, self.read([entry.layout.whole() for entry in group]), strict=True):
                try:
                    yield entry.assemble(data)
                except EvictedEntryError:
                    continue
                except DamagedEntryError:
                    self.set_aside(entry.info.key.digest)

    def entries(self, names: Sequence[str]) -> list[RemoteEntry | None]:
        """The entries of objects by name, None for what is no entry of this deployment; raises `RemoteError`."""
        with self._guarding(), self.reader() as reader:
            prefixes = self.read_prefixes(reader, names)
        found: list[RemoteEntry | None] = []
        for name, prefix in zip(names, prefixes, strict=True):
            try:
                found.append(None if prefix is None else RemoteEntry(self, self.format.parse(name, prefix)))
            except DamagedEntryError as error:
                logger.debug("%s", error)
                found.append(None)
        return found

    def set_aside(self, digest: str, layers: Iterable[int] = ()) -> None:
        """See `KVTier`: the entry is a miss for a while, and whoever computes it writes it anew."""
        with self._lock:
            self._miss(digest)
            self._counts["damaged"] += 1
            count = self._counts["damaged"]
        level = logging.WARNING if count == 1 else logging.DEBUG  # one line, and the counter
        logger.log(level, "entry %s in the remote tier at %s is not what was written, and is a miss", digest, self.address)

    def miss(self, digest: str) -> None:
        """Take an entry for missing for a while: it went, or part of it, while it was read."""
        with self._lock:
            self._miss(digest)

    def forget(self, digests: Iterable[str]) -> None:
        """Look entries up anew at their next use."""
        with self._lock:
            for digest in digests:
                self._layouts.pop(digest, None)

    def delete(self, digests: Iterable[str]) -> None:
        """Remove entries; they are misses here at once, and there when the remote has been told."""
        digests = list(digests)
        self.forget(digests)
        self.uploads.remove(digests)

    def put(self, entry: EncodedEntry) -> None:
        """Write an entry behind; see `UploadQueue`."""
        self.uploads.put(entry)

    def send(self, entries: Sequence[EncodedEntry]) -> None:
        """Write entries that are not there yet, now; raises `RemoteError`."""
        self._send(entries)

    def speed(self) -> RemoteSpeed | None:
        """As measured; None before anything was read."""
        return self.meter.speed()

    def stats(self) -> RemoteStats:
        """What happened since it was opened."""
        speed, counts = self.meter.speed(), self._counts
        return RemoteStats(
            self.reads.state,
            counts["hits"],
            counts["misses"],
            counts["failures"],
            counts["damaged"],
            counts["read_bytes"],
            counts["sent"],
            counts["sent_bytes"],
            self.uploads.dropped,
            self.uploads.size()[0],
            self.meter.latency_s,
            None if speed is None else speed.bytes_per_s,
        )

    def close(self) -> None:
        """Send what waits, for as long as a time-out, and end all connections."""
        if left := self.uploads.close(self._limits.timeout_s):
            logger.warning("%d entries were not sent to the remote tier; `cacheblend store push` sends what is stored", left)
        self.backend.close()

    @contextmanager
    def reader(self) -> Iterator[RangeReader]:
        """A connection to read over."""
        reader = self.backend.reader()
        try:
            yield reader
        finally:
            reader.close()

    def fail(self, error: RemoteError) -> None:
        """Note that a read was not answered."""
        self._count("failures")
        if self.reads.fail():
            logger.warning("the remote tier is not asked for a while, its entries are misses: %s", error)

    def _miss(self, digest: str) -> None:
        self._layouts.pop(digest, None)
        self._missing[digest] = time.monotonic()
        while len(self._missing) > MAX_MISSING:
            self._missing.popitem(last=False)

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """Tell the breaker how a call ended."""
        try:
            yield
        except RemoteError as error:
            self.fail(error)
            raise
        self.reads.succeed()

    @contextmanager
    def _timing(self, *, tells_latency: bool) -> Iterator[StreamClock]:
        clock = StreamClock(self.meter, tells_latency=tells_latency)
        yield clock
        clock.stop()

    def _within(
        self,
        timeout_s: float,
        task: Callable[[], T],
        abort: Callable[[], None] = lambda: None,
        answers: Sequence[object] = (),
        bound_s: float = math.inf,
    ) -> T:
        """What a task in a thread of its own returns, unless that takes longer.

        Args:
            timeout_s: seconds; as many again after each further one of its `answers`, up to `bound_s`.
            task: the task.
            abort: has it end.
            answers: grows while it runs.
            bound_s: seconds in all.
        """
        future = THREADS.call(task)
        started = time.monotonic()
        while True:
            count, waited_s = len(answers), time.monotonic() - started
            try:
                return future.result(min(timeout_s, max(0.0, bound_s - waited_s)))
            except TimeoutError:
                if len(answers) > count and waited_s < bound_s:
                    continue
            abort()
            raise RemoteError(f"{self.address} did not answer within {min(timeout_s, bound_s):.3g} s")

    def _is_out(self, digest: str) -> bool:
        with self._lock:
            since = self._missing.get(digest)
            if since is not None and time.monotonic() - since > MISSING_S:
                del self._missing[digest]
                since = None
        return since is not None or self.uploads.is_removing(digest)

    def _known(self, digest: str) -> ObjectLayout | None:
        with self._lock:
            layout, read_at = self._layouts.get(digest, (None, 0.0))
            if layout is not None and time.monotonic() - read_at > LAYOUT_S:
                del self._layouts[digest]
                return None
            return layout

    def _look_up(self, digests: Sequence[str]) -> dict[str, ObjectLayout]:
        """Read the headers of entries; those that are not there, or damaged, are left out."""
        limits, last_s = self._limits, self._lookup_s
        patience_s = limits.timeout_s if last_s is None else min(limits.timeout_s, max(MIN_PATIENCE_S, LOOKUPS * last_s))
        opened: list[RangeReader] = []
        answers: list[float] = []
        started = time.perf_counter()

        def read() -> list[Bytes | None]:
            with self.reader() as reader:
                opened.append(reader)
                names = [self.format.name(digest) for digest in digests]
                return self.read_prefixes(reader, names, lambda: answers.append(time.perf_counter()))

        try:
            bound_s = limits.bound_s(len(digests) * PREFIX_BYTES)
            prefixes = self._within(patience_s, read, lambda: _abort(opened), answers, bound_s)
        except RemoteError:
            self._lookup_s = 2 * patience_s / LOOKUPS  # more patience next time
            raise
        self._lookup_s = answers[0] - started
        found: dict[str, ObjectLayout] = {}
        for digest, prefix in zip(digests, prefixes, strict=True):
            if prefix is None:
                continue
            try:
                found[digest] = self.format.parse(self.format.name(digest), prefix, digest)
            except DamagedEntryError as error:
                logger.debug("%s", error)
                self.set_aside(digest)
        with self._lock:
            for digest, layout in found.items():
                self._layouts[digest] = layout, time.monotonic()
                self._layouts.move_to_end(digest)
            while len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        return found

    def read_prefixes(
        self, reader: RangeReader, names: Sequence[str], on_answer: Callable[[], None] = lambda: None
    ) -> list[Bytes | None]:
        """What stands before each object's first layer; what is no object's is given as it is. Calls back at each answer."""
        reader.request([ObjectRange(name, 0, PREFIX_BYTES) for name in names])
        prefixes: list[Bytes | None] = []
        for _ in names:
            prefixes.append(reader.receive())
            on_answer()
        longer: list[tuple[int, int]] = []
        for at, prefix in enumerate(prefixes):
            if prefix is None:
                continue
            try:
                needed = self.format.prefix_bytes(prefix)
            except DamagedEntryError:
                continue
            if needed > len(prefix) >= PREFIX_BYTES:
                longer.append((at, needed))
        reader.request([ObjectRange(names[at], PREFIX_BYTES, needed) for at, needed in longer])
        for at, _ in longer:
            first, rest = prefixes[at], reader.receive()
            on_answer()
            prefixes[at] = None if first is None or rest is None else np.concatenate([first, rest])
        return prefixes

    def _send(self, entries: Sequence[EncodedEntry]) -> None:
        names = [self.format.name(entry.info.key.digest) for entry in entries]
        there = self.backend.sizes(names)
        for entry, name, size in zip(entries, names, there, strict=True):
            digest = entry.info.key.digest
            if size is None or digest in self._missing:
                parts = self.format.pack(entry)
                self.backend.put(name, parts)
                self._count("sent")
                self._count("sent_bytes", sum(map(len, parts)))
                with self._lock:
                    self._missing.pop(digest, None)
                    self._layouts.pop(digest, None)

    def _remove(self, digests: Sequence[str]) -> None:
        self.backend.delete(map(self.format.name, digests))


def _abort(opened: Sequence[RangeReader]) -> None:
    for reader in opened:
        reader.abort()
