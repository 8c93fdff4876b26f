"""The threads that bring layer i+1's stored KV while layer i is computed (paper §5, §6).

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from cacheblend.blend import KVGeometry, LayerKV, Prompt, SegmentKV
from cacheblend.store import ChunkKV, Placement, PrefixRun
from cacheblend.store.errors import FusionCancelledError, IncompatibleKVError

from .config import LoaderConfig
from .staging import Arrival, Room, Staging
from .threads import DaemonThreads

THREADS = DaemonThreads("layer-loader")  # of all loaders
_Chunk = tuple[int, int, SegmentKV]
COPIED_AT_ONCE = 8 * 2**20  # bytes; of smaller copies a third of the time went to threads waiting for the interpreter


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a thread does in one go: a file's layer, or a layer of some chunks that are in memory, with their first and last
    positions in the prompt; a layer without chunks is one read of nothing.
    """

    layer: int
    chunks: Sequence[_Chunk]


class LayerLoader:
    """Loads a prompt's stored KV ahead of the fusor: layer by layer, one read a chunk and layer, several under way at once.

    A `LayerSource` for `Fusor.fuse`: segments may bring `Placement`s of either tier, or `ChunkKV`s in memory, mixed. The
    paper's three calls are `fetch_kv` and `synchronize` here, and `Decoder.run_rows` (`prefill_layer`) in the fusor. An error
    while loading is raised by `synchronize`; closing stops the threads. Use it as a context manager, inside the stores' pin.

    Args:
        config: look-ahead and reads in flight.
    """

    def __init__(self, config: LoaderConfig | None = None) -> None:
        self._config = config or LoaderConfig()
        self._changed = threading.Condition()
        self._reads: list[_Read] = []
        self._next_read = 0
        self._missing: Counter[int] = Counter()
        self._rooms: dict[int, Room] = {}
        self._ready: dict[int, Arrival] = {}
        self._consumed, self._under_way, self._under_way_since = 0, 0, 0.0
        self._stopped = False
        self._error: BaseException | None = None
        self._tasks: list[threading.Event] = []
        self._done: list[_Read] = []
        self.load_s = 0.0

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that were read from "ram", "nvme", and "memory" that is no store's, up to now."""
        counts: Counter[str] = Counter()
        for read in tuple(self._done):
            for start, stop, kv in read.chunks:
                if isinstance(kv, Placement):
                    counts[kv.tier] += kv.layer_bytes(read.layer)
                else:
                    counts["memory"] += self._geometry.layer_bytes(stop - start)
        return dict(counts)

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load; see `LayerSource.start`.

        Raises:
            FusionCancelledError: the loader was closed before.
            IncompatibleKVError: a chunk's KV does not have the model's number of layers, shape or dtype.
            TypeError: KV that is neither a placement nor in memory.
        """
        if self._tasks:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        if self._stopped:
            raise FusionCancelledError("the loader was closed before the fusion began")
        for start, _, kv in prompt.cached():
            if not isinstance(kv, Placement | PrefixRun | ChunkKV):
                raise TypeError(f"segments must bring a Placement, a PrefixRun or a ChunkKV, not {type(kv).__name__}")
            layers = len(kv.layers) if isinstance(kv, ChunkKV) else kv.layers
            shapes = {(layers, *kv.heads(layer), kv.dtype) for layer in range(layers)}  # what is copied is bytes
            needed = geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype
            if shapes != {needed}:
                raise IncompatibleKVError(
                    f"the KV at position {start} has (layers, heads, head size, dtype) {sorted(shapes, key=str)} and the model "
                    f"{needed}; precompute it with this model"
                )
        for layer in range(geometry.layers):
            cached = prompt.cached(exact_only=layer == 0 and not reuse_layer_0)
            together = max(1, COPIED_AT_ONCE // max(1, geometry.layer_bytes(len(prompt)) // max(1, len(cached))))
            self._reads += [_Read(layer, chunks) for chunks in self._grouped(cached, together)]
        self._missing.update(read.layer for read in self._reads)
        self._geometry, self._tokens = geometry, len(prompt)
        self._lookahead = self._config.lookahead_layers(geometry.layer_bytes(len(prompt)))
        self._staging = Staging(geometry)
        for layer in range(min(self._lookahead, geometry.layers)):
            self._rooms[layer] = self._staging.room(self._tokens)
        copies = sum(not self.waits_for_device(kv) for _, _, kv in prompt.cached())
        # Of copies no more at once than there are cores, and one is made by who waits for the layer; see `synchronize`.
        most = len(prompt.cached()) - copies + min(copies, max(1, torch.get_num_threads() - 1))
        load_all = functools.partial(_load_all, weakref.ref(self), self._changed)
        self._tasks = [THREADS.run(load_all) for _ in range(min(self._config.reads_in_flight, max(1, most)))]

    def fetch_kv(self, kv: SegmentKV, layer: int, room: Room, start: int, stop: int) -> None:
        """Bring one chunk's layer to its place in the prompt's (the paper's `fetch_kv`); several threads call it at once.

        Args:
            kv: the chunk's.
            layer: which.
            room: the layer of the whole prompt, on the device.
            start: the chunk's first position.
            stop: the one after its last.
        """
        assert isinstance(kv, Placement | PrefixRun | ChunkKV)  # checked in start
        self._staging.bring(kv, layer, room, start, stop)

    def waits_for_device(self, kv: SegmentKV) -> bool:
        """Whether bringing a chunk's layer means to wait for a device: such reads go chunk by chunk, many under way at once.

        Others take a core for as long as they take; whoever waits for a layer makes some of them himself.
        """
        return isinstance(kv, Placement) and kv.tier == "nvme"

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over; once for every layer, in order.

        Meanwhile this thread copies what is in memory as well: the core that it would leave to another is its own.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        if layer != self._consumed:
            raise RuntimeError(f"layers are handed over in order: layer {self._consumed} is next, not {layer}")
        if not self._tasks and not self._stopped:
            raise RuntimeError("start the LayerLoader before the first layer is asked for")

        def is_over() -> bool:
            return layer in self._ready or self._error is not None or self._stopped

        self._read_while(lambda: not is_over() and self._is_copy())
        with self._changed:
            self._changed.wait_for(is_over)
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise FusionCancelledError(f"loading was stopped before layer {layer} arrived")
            arrival = self._ready.pop(layer)
            self._consumed = layer + 1
            if layer + self._lookahead < self._geometry.layers:
                self._rooms[layer + self._lookahead] = self._staging.room(self._tokens)
            self._changed.notify_all()
        return arrival.wait()

    def close(self) -> None:
        """Stop loading, wait for the threads to be done, and drop what was loaded. Reads under way are read to their end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for ended in self._tasks:
            ended.wait()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)  # one may be the fusor's own
        self._ready.clear()
        self._rooms.clear()
        self._error = None  # its traceback holds a layer and this loader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._tasks and not self._stopped:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            warnings.warn("a LayerLoader was not closed; use it as a context manager", ResourceWarning, stacklevel=2)

    def _may_read(self) -> bool:
        """Whether a thread has something to do: a read within the look-ahead, or to end."""
        return self._over() or self._reads[self._next_read].layer < self._consumed + self._lookahead

    def _over(self) -> bool:
        return self._stopped or self._error is not None or self._next_read == len(self._reads)

    def _grouped(self, cached: Sequence[_Chunk], together: int) -> list[list[_Chunk]]:
        """Each chunk on a device alone; so many of those in memory one after the other."""
        groups: list[list[_Chunk]] = []
        copies: list[_Chunk] = []
        for chunk in cached:
            if self.waits_for_device(chunk[2]):
                groups.append([chunk])
                continue
            copies.append(chunk)
            if len(copies) == together:
                groups.append(copies)
                copies = []
        return [*groups, copies] if copies or not groups else groups

    def _is_copy(self) -> bool:
        """Whether the next read is of what is in memory."""
        return not any(self.waits_for_device(kv) for _, _, kv in self._reads[self._next_read].chunks)

    def _read_on(self) -> bool:
        """Make reads in this thread while the look-ahead allows it; False where there is none left."""
        self._read_while(lambda: True)
        return not self._over()

    def _read_while(self, wanted: Callable[[], bool]) -> None:
        """Make reads in this thread while the look-ahead allows it and the next one is wanted.

        What is done is entered and the next read taken under one lock: between the two the fusor would take it, and the
        thread wait for it.
        """
        with self._changed:
            read = self._take(wanted)
        while read is not None:
            failed: BaseException | None = None
            try:
                for start, stop, kv in read.chunks:
                    self.fetch_kv(kv, read.layer, self._rooms[read.layer], start, stop)
            except BaseException as error:  # travels to the fusor, which raises it
                failed = error
            with self._changed:
                self._enter(read, failed)
                read = self._take(wanted)

    def _take(self, wanted: Callable[[], bool]) -> _Read | None:
        if self._over() or not self._may_read() or not wanted():
            return None
        if not self._under_way:
            self._under_way_since = time.perf_counter()
        self._under_way += 1
        self._next_read += 1
        return self._reads[self._next_read - 1]

    def _enter(self, read: _Read, failed: BaseException | None) -> None:
        """Enter a read that is done; the layer is ready with its last."""
        self._under_way -= 1
        if not self._under_way:
            self.load_s += time.perf_counter() - self._under_way_since
            if self._stopped:
                self._changed.notify_all()
        if failed is not None:
            self._error = self._error or failed
            self._changed.notify_all()
            return
        self._done.append(read)
        self._missing[read.layer] -= 1
        if not self._missing[read.layer]:
            self._ready[read.layer] = self._staging.arrive(self._rooms.pop(read.layer))
            self._changed.notify_all()


def _load_all(reference: weakref.ref[LayerLoader], changed: threading.Condition) -> None:
    """A thread: it holds the loader only while it reads, so that one that was dropped unclosed is collected, and warns."""

    def may_go_on() -> bool:
        loader = reference()
        return loader is None or loader._may_read()

    going_on = True
    while going_on:
        with changed:
            changed.wait_for(may_go_on)
        loader = reference()
        going_on = loader is not None and loader._read_on()
        del loader
