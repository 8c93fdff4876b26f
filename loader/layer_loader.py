"""The threads that bring layer i+1's stored KV while layer i is computed (paper §5, §6).

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from cacheblend.blend import KVGeometry, LayerKV, Prompt, SegmentKV
from cacheblend.store import ChunkKV, Placement, PrefixRun
from cacheblend.store.errors import FusionCancelledError, IncompatibleKVError

from .config import LoaderConfig
from .staging import Arrival, Staging
from .threads import DaemonThreads

THREADS = DaemonThreads("layer-loader")  # of all loaders


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One chunk's layer, from `start` to `stop` of the prompt; a layer without chunks is one read of nothing."""

    layer: int
    start: int = 0
    stop: int = 0
    kv: SegmentKV | None = None


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
        self._rooms: dict[int, LayerKV] = {}
        self._ready: dict[int, Arrival] = {}
        self._consumed, self._under_way, self._under_way_since = 0, 0, 0.0
        self._stopped = False
        self._error: BaseException | None = None
        self._tasks: list[threading.Event] = []
        self.bytes_by_tier: dict[str, int] = defaultdict(int)
        self.load_s = 0.0

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load; see `LayerSource.start`.

        Raises:
            FusionCancelledError: the loader was closed before.
            IncompatibleKVError: a chunk's KV does not have the model's number of layers.
        """
        if self._tasks:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        if self._stopped:
            raise FusionCancelledError("the loader was closed before the fusion began")
        for start, _, kv in prompt.cached():
            layers = geometry.layers
            if isinstance(kv, Placement | PrefixRun):
                layers = kv.layers
            elif isinstance(kv, ChunkKV):
                layers = len(kv.layers)
            if layers != geometry.layers:
                raise IncompatibleKVError(
                    f"the KV at position {start} has {layers} layers and the model {geometry.layers}; precompute it with this "
                    "model"
                )
        for layer in range(geometry.layers):
            cached = prompt.cached(exact_only=layer == 0 and not reuse_layer_0)
            self._reads += [_Read(layer, start, stop, kv) for start, stop, kv in cached] or [_Read(layer)]
        self._missing.update(read.layer for read in self._reads)
        self._geometry, self._tokens = geometry, len(prompt)
        self._lookahead = self._config.lookahead_layers(geometry.layer_bytes(len(prompt)))
        self._staging = Staging(geometry)
        most = max(1, len(prompt.cached()))
        load_all = functools.partial(_load_all, weakref.ref(self), self._changed)
        self._tasks = [THREADS.run(load_all) for _ in range(min(self._config.reads_in_flight, most))]

    def fetch_kv(self, kv: SegmentKV, layer: int, whole: LayerKV, start: int, stop: int) -> None:
        """Bring one chunk's layer to its place in the prompt's (the paper's `fetch_kv`); several threads call it at once.

        Args:
            kv: the chunk's.
            layer: which.
            whole: the layer of the whole prompt, on the device.
            start: the chunk's first position.
            stop: the one after its last.
        """
        if not isinstance(kv, Placement | PrefixRun | ChunkKV):
            raise TypeError(f"segments must bring a Placement, a PrefixRun or a ChunkKV, not {type(kv).__name__}")
        kv_heads, head_dim = kv.heads(layer)
        needed = (self._geometry.kv_heads, self._geometry.head_dim)
        if (kv_heads, head_dim) != needed:  # copying would broadcast one head to all
            raise IncompatibleKVError(
                f"the KV at position {start} has (heads, head size) {(kv_heads, head_dim)} and the model {needed}; "
                "precompute it with this model"
            )
        self._staging.bring(kv, layer, whole, start, stop)

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over; once for every layer, in order.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        if layer != self._consumed:
            raise RuntimeError(f"layers are handed over in order: layer {self._consumed} is next, not {layer}")
        with self._changed:
            if not self._tasks and not self._stopped:
                raise RuntimeError("start the LayerLoader before the first layer is asked for")
            self._changed.wait_for(lambda: layer in self._ready or self._error is not None or self._stopped)
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise FusionCancelledError(f"loading was stopped before layer {layer} arrived")
            arrival = self._ready.pop(layer)
            self._consumed = layer + 1
            self._changed.notify_all()
        return arrival.wait()

    def close(self) -> None:
        """Stop loading, wait for the threads to be done, and drop what was loaded. Reads under way are read to their end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for ended in self._tasks:
            ended.wait()
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
        if self._stopped or self._error is not None or self._next_read == len(self._reads):
            return True
        return self._reads[self._next_read].layer < self._consumed + self._lookahead

    def _read_next(self) -> bool:
        """Take a read and make it, in a thread; False where there is none left."""
        with self._changed:
            if self._stopped or self._error is not None or self._next_read == len(self._reads):
                return False
            if not self._may_read():
                return True  # another thread was sooner
            read = self._reads[self._next_read]
            self._next_read += 1
        try:
            self._read(read)
        except BaseException as error:  # travels to the fusor, which raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            return False
        return True

    def _read(self, read: _Read) -> None:
        with self._changed:
            if read.layer not in self._rooms:
                self._rooms[read.layer] = self._staging.room(self._tokens)
            whole = self._rooms[read.layer]
            if not self._under_way:
                self._under_way_since = time.perf_counter()
            self._under_way += 1
        try:
            if read.kv is not None:
                self.fetch_kv(read.kv, read.layer, whole, read.start, read.stop)
        finally:
            with self._changed:
                self._under_way -= 1
                if not self._under_way:
                    self.load_s += time.perf_counter() - self._under_way_since
        with self._changed:
            if isinstance(read.kv, Placement):
                self.bytes_by_tier[read.kv.tier] += read.kv.layer_bytes(read.layer)
            elif read.kv is not None:
                self.bytes_by_tier["memory"] += self._geometry.layer_bytes(read.stop - read.start)
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
        going_on = loader is not None and loader._read_next()
        del loader
