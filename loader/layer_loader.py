"""Layer-wise prefetch: stored KV of layer i+1 is read while layer i is computed (paper §5, §6).

Threads read every file's layer straight into the layer's final buffer. On a CPU, what is in RAM already is copied by the fusor
when it comes to the layer; on CUDA, threads bring both through pinned memory on a copy stream.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from cacheblend.base.checks import MIB, check_share, check_whole
from cacheblend.base.errors import ConfigError, FusionCancelledError
from cacheblend.base.threads import DaemonThreads
from cacheblend.blend import DEFAULT_RATIO, check_shape
from cacheblend.store import tiers_in_memory

from .staging import LayerBuffer, PendingLayer, Staging

if TYPE_CHECKING:
    from cacheblend.blend import KVGeometry, LayerKV, Prompt
    from cacheblend.store import KVHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Bounds of the loader's threads and defaults of the loading controller.

    Args:
        lookahead_bytes: how many bytes of whole layers the loader may hold ready ahead of the fusor; one layer always.
        reads_in_flight: how many reads the loader has under way at once, each in a thread; on a CPU of files only.
        quality_ratio: r*, the smallest recompute ratio whose quality loss is negligible (paper §5.1); `FusionConfig`'s default.
            An engine takes the ratio of its store's calibration (`cacheblend calibrate`) where this one is at its default, and
            no more than `max_ratio`; to have the default itself, set `FusionConfig.recompute_ratio`.
        max_ratio: the controller never asks for more, however long the loading takes.

    Raises:
        ConfigError: a value outside its range.
    """

    lookahead_bytes: int = 256 * MIB
    reads_in_flight: int = 4
    quality_ratio: float = DEFAULT_RATIO
    max_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lookahead_bytes", "reads_in_flight"):
            check_whole(name, getattr(self, name))
        check_share("quality_ratio", self.quality_ratio)
        if not self.quality_ratio <= self.max_ratio <= 1:
            raise ConfigError("max_ratio", self.max_ratio, f"a number from quality_ratio ({self.quality_ratio}) to 1")

    def lookahead_layers(self, layer_bytes: int) -> int:
        """Layers of so many bytes that may be ready ahead of the fusor."""
        return max(1, self.lookahead_bytes // max(1, layer_bytes))


THREADS = DaemonThreads("layer-loader")  # of all loaders


class LayerRead(NamedTuple):
    """A chunk's layer, and the chunk's place in the prompt."""

    layer: int
    start: int
    stop: int
    kv: KVHandle


class LayerLoader:
    """Loads a prompt's stored KV ahead of the fusor: layer by layer, one read a chunk and layer, several under way at once.

    On a CPU what is in memory already is copied by who waits for the layer, with all of the processors that it computes with:
    a thread that copied ahead would take one from computing, for longer.

    A `LayerSource` for `Fusor.fuse`: segments may bring KV of any tier and KV in memory, mixed. The
    paper's three calls are `fetch_kv` and `synchronize` here, and `Decoder.run_rows` (`prefill_layer`) in the fusor. An error
    while loading is raised by `synchronize`; closing stops the threads. Use it as a context manager, inside the stores' pin.

    Args:
        config: look-ahead and reads in flight.

    Attributes:
        load_s: seconds in which reads were under way.
    """

    def __init__(self, config: LoaderConfig | None = None) -> None:
        self._config = config or LoaderConfig()
        self._changed = threading.Condition()
        self._started = False
        self._reads: list[LayerRead] = []  # of threads, in the order of layers
        self._next_read = 0
        self._copies: list[list[LayerRead]] = []  # of each layer
        self._missing: Counter[int] = Counter()
        self._buffers: dict[int, LayerBuffer] = {}
        self._ready: dict[int, PendingLayer] = {}
        self._consumed, self._under_way, self._under_way_since = 0, 0, 0.0
        self._stopped = False
        self._error: BaseException | None = None
        self._tasks: list[threading.Event] = []
        self._done: list[LayerRead] = []
        self.load_s = 0.0

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that were read from each tier, and from "memory" that is no store's, up to now."""
        counts: Counter[str] = Counter()
        for read in tuple(self._done):
            counts[read.kv.tier] += read.kv.layer_bytes(read.layer)
        return dict(counts)

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load; see `LayerSource.start`.

        Raises:
            FusionCancelledError: the loader was closed before.
            IncompatibleKVError: a chunk's KV does not have the model's number of layers, shape or dtype.
        """
        if self._started:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        if self._stopped:
            raise FusionCancelledError("the loader was closed before the fusion began")
        check_shape(prompt, geometry)
        self._started = True
        stored, at_layer_0 = prompt.cached(), prompt.cached(exact_only=not reuse_layer_0)
        copied = {start for start, _, kv in stored if self._is_copy(kv, geometry)}
        for layer in range(geometry.layers):
            reads = [LayerRead(layer, *chunk) for chunk in (stored if layer else at_layer_0)]
            self._copies.append([read for read in reads if read.start in copied])
            self._reads += [read for read in reads if read.start not in copied]
        self._missing.update(read.layer for read in self._reads)
        self._geometry, self._tokens = geometry, len(prompt)
        self._lookahead = self._config.lookahead_layers(geometry.layer_bytes(len(prompt)))
        self._staging = Staging(geometry)
        for layer in range(min(self._lookahead, geometry.layers)):
            self._allocate(layer)
        threads = min(self._config.reads_in_flight, len(stored) - len(copied))
        load_all = functools.partial(_read_all, weakref.ref(self), self._changed)
        self._tasks = [THREADS.run(load_all) for _ in range(threads)]

    def fetch_kv(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
        """Load one chunk's layer to its place in the prompt's (the paper's `fetch_kv`); several threads call it at once.

        Args:
            kv: the chunk's.
            layer: which.
            buffer: the layer of the whole prompt, on the device.
            start: the chunk's first position.
            stop: the one after its last.
        """
        if self._is_copy(kv, self._geometry):
            kv.copy_layer(layer, buffer.whole.kv_21HND[:, 0, :, start:stop])
        else:
            self._staging.load(kv, layer, buffer, start, stop)

    def waits_for_device(self, kv: KVHandle) -> bool:
        """Whether loading a chunk's layer means to wait for a device, so that threads do it ahead."""
        return not kv.in_memory

    def _is_copy(self, kv: KVHandle, geometry: KVGeometry) -> bool:
        return geometry.device.type == "cpu" and not self.waits_for_device(kv)

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over; once for every layer, in order.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        if layer != self._consumed:
            raise RuntimeError(f"layers are handed over in order: layer {self._consumed} is next, not {layer}")
        if not self._started and not self._stopped:
            raise RuntimeError("start the LayerLoader before the first layer is asked for")
        self._copy(layer)
        with self._changed:
            self._changed.wait_for(lambda: not self._missing[layer] or self._error is not None or self._stopped)
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise FusionCancelledError(f"loading was stopped before layer {layer} arrived")
            pending = self._ready.pop(layer)
            del self._buffers[layer]
            self._consumed = layer + 1
            if layer + self._lookahead < self._geometry.layers:
                self._allocate(layer + self._lookahead)
            self._changed.notify_all()
        return pending.wait()

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
        self._buffers.clear()
        self._error = None  # its traceback holds a layer and this loader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._started and not self._stopped:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            warnings.warn("a LayerLoader was not closed; use it as a context manager", ResourceWarning, stacklevel=2)

    def _may_read(self) -> bool:
        """Whether a thread has something to do: a read within the look-ahead, or to end."""
        return self._over() or self._reads[self._next_read].layer < self._consumed + self._lookahead

    def _over(self) -> bool:
        return self._stopped or self._error is not None or self._next_read == len(self._reads)

    def _allocate(self, layer: int) -> None:
        """Memory for a layer; one that no thread reads anything of is ready with it, before others' copies are issued."""
        self._buffers[layer] = self._staging.buffer(self._tokens)
        if not self._missing[layer]:
            self._ready[layer] = self._staging.finish(self._buffers[layer])

    def _copy(self, layer: int) -> None:
        """Copy what is in memory of a layer, in this thread."""
        with self._changed:
            if self._stopped or self._error is not None or not self._copies[layer]:
                return
            buffer = self._buffers[layer]
            self._begin()
        try:
            for read in self._copies[layer]:
                self.fetch_kv(read.kv, layer, buffer, read.start, read.stop)
            self._done += self._copies[layer]
        except BaseException as error:
            self._error = error  # threads read no further
            raise
        finally:
            with self._changed:
                self._end()

    def _read_on(self) -> bool:
        """Make reads in this thread while the look-ahead allows it; False where there is none left.

        What is done is entered and the next read taken under one lock: between the two another would take it, and this thread
        wait for it.
        """
        with self._changed:
            read = self._take()
        while read is not None:
            failed: BaseException | None = None
            try:
                self.fetch_kv(read.kv, read.layer, self._buffers[read.layer], read.start, read.stop)
            except BaseException as error:  # travels to the fusor, which raises it
                failed = error
            with self._changed:
                self._enter(read, failed)
                read = self._take()
        return not self._over()

    def _take(self) -> LayerRead | None:
        if self._over() or not self._may_read():
            return None
        self._begin()
        self._next_read += 1
        return self._reads[self._next_read - 1]

    def _enter(self, read: LayerRead, failed: BaseException | None) -> None:
        """Enter a read that is done; the layer is ready with its last."""
        self._end()
        if failed is not None:
            self._error = self._error or failed
            self._changed.notify_all()
            return
        self._done.append(read)
        self._missing[read.layer] -= 1
        if not self._missing[read.layer]:
            self._ready[read.layer] = self._staging.finish(self._buffers[read.layer])
            self._changed.notify_all()

    def _begin(self) -> None:
        if not self._under_way:
            self._under_way_since = time.perf_counter()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.load_s += time.perf_counter() - self._under_way_since
            if self._stopped:
                self._changed.notify_all()


def copied_tiers(device: torch.device) -> Collection[str]:
    """The tiers whose KV a `LayerLoader` copies when the fusor asks for a layer, none ahead: on a CPU what is in its memory."""
    return tiers_in_memory() if device.type == "cpu" else ()


def _read_all(reference: weakref.ref[LayerLoader], changed: threading.Condition) -> None:
    """Run a thread of a loader, until nothing is left to be read.

    It holds the loader only while it reads, so that one that was dropped unclosed is collected, and warns.
    """

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
