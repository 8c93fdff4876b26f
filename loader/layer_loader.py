"""Layer-wise prefetch: stored KV of layer i+1 is read while layer i is computed (paper §5, §6).

Threads read every file's layer straight into the layer's final buffer. On a CPU the fusor copies entries in RAM when it comes
to the layer; on CUDA, threads bring both through pinned memory on a copy stream.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

import functools
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cacheblend.base.errors import FusionCancelledError
from cacheblend.base.files import Closing
from cacheblend.base.memory import Bytes
from cacheblend.base.threads import in_daemon_thread
from cacheblend.blend import KVGeometry, LayerKV, Prompt
from cacheblend.store import KVHandle
from cacheblend.store.chunk import host_bytes

from .config import LoaderConfig

THREAD_NAME = "layer-loader"


@dataclass(slots=True, eq=False)
class LayerBuffer:
    """Memory for a prompt's layer; on the CPU also as the bytes of its keys and values, B to a head's vector.

    On CUDA, `copied` is the end of the copies to it.
    """

    layer_kv: LayerKV
    bytes_2HNB: Bytes | None = None
    copied: torch.cuda.Event | None = None

    def wait(self) -> LayerKV:
        """The layer, safe to use on the current stream, which waits for the copies; the host does not."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.layer_kv.k_1HND.device)
            stream.wait_event(self.copied)
            for tensor in (self.layer_kv.k_1HND, self.layer_kv.v_1HND):
                tensor.record_stream(stream)
        return self.layer_kv


class Staging:
    """Loads chunks to their place: on the CPU straight there, on CUDA through pinned memory on a stream of its own.

    Used by several threads at once, each for chunks of its own. The caching host allocator keeps a pinned block from reuse
    until the copies recorded on it are done, so staging memory is returned without a device-wide synchronise.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._stream = _copy_stream(geometry.device) if geometry.device.type == "cuda" else None

    def buffer(self, tokens: int, layer: int = 0) -> LayerBuffer:
        """Memory for a layer, safe to copy to.

        On CUDA it belongs to the copies' stream: memory of the fusor's stream may be handed out while kernels queued there
        still write to it, and the copies do not wait for them.
        """
        if self._stream is None:
            layer_kv = LayerKV.empty(self._geometry, tokens, layer)
            return LayerBuffer(layer_kv, host_bytes(layer_kv.kv_21HND)[:, 0])
        with torch.cuda.stream(self._stream):
            return LayerBuffer(LayerKV.empty(self._geometry, tokens, layer))

    def load(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
        """Read a chunk's layer to the positions from `start` to `stop`, in the calling thread."""
        if buffer.bytes_2HNB is not None:
            kv.read_layer_into(layer, buffer.bytes_2HNB[:, :, start:stop])
            return
        kv_2HTD = buffer.layer_kv.kv_21HND[:, 0, :, start:stop]
        if (encoded := kv.encoded_layer(layer)) is not None:  # goes to a GPU as it is stored, and is decoded there
            pinned = encoded.tensor.pin_memory()
            with torch.cuda.stream(self._stream):
                decoded = encoded.decode(pinned.to(kv_2HTD.device, non_blocking=True))
                for to_HTD, x_HTD in zip(kv_2HTD, decoded, strict=True):
                    to_HTD.copy_(x_HTD)
            return
        pinned_2HTD = torch.empty(kv_2HTD.shape, dtype=kv_2HTD.dtype, pin_memory=True)
        kv.read_layer_into(layer, host_bytes(pinned_2HTD))
        with torch.cuda.stream(self._stream):
            kv_2HTD.copy_(pinned_2HTD, non_blocking=True)

    def finish(self, buffer: LayerBuffer) -> None:
        """Close a layer: all of its copies have been issued."""
        if self._stream is not None:
            buffer.copied = self._stream.record_event()


# One for all loaders of a device: the allocator keeps free memory apart by stream, and their copies share a bus in any case.
_copy_stream = functools.cache(torch.cuda.Stream)


class LayerRead(NamedTuple):
    """A chunk's layer, and the chunk's place in the prompt."""

    layer: int
    start: int
    stop: int
    kv: KVHandle


class LayerLoader(Closing):
    """Loads a prompt's stored KV ahead of the fusor: layer by layer, one read a chunk and layer, several at once.

    On a CPU the fusor's thread copies entries in memory, with all of its processors: a thread that copied ahead would occupy
    one of them for longer (docs/adr/012).

    A `LayerSource` for `Fusor.fuse`: segments may have KV of any tier and KV in memory, mixed. The
    paper's three calls are `fetch_kv` and `synchronize` here, and `Decoder.run_rows` (`prefill_layer`) in the fusor. An error
    while loading is raised by `synchronize`; closing stops the threads. Use it as a context manager, inside the stores' pin.
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
        self._consumed, self._under_way, self._under_way_since = 0, 0, 0.0
        self._stopped = False
        self._error: BaseException | None = None
        self._tasks: list[Future[None]] = []
        self._done: list[LayerRead] = []
        self.load_s = 0.0  # seconds in which reads were under way

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes read so far from each tier, and from "memory" that belongs to no store."""
        counts: Counter[str] = Counter()
        for read in tuple(self._done):
            counts[read.kv.tier] += read.kv.layer_bytes(read.layer)
        return dict(counts)

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load, as `LayerSource.start` says.

        Raises:
            FusionCancelledError: the loader was closed before.
        """
        if self._started:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        if self._stopped:
            raise FusionCancelledError("the loader was closed before the fusion began")
        self._started = True
        stored, at_layer_0 = prompt.cached(), prompt.cached(exact_only=not reuse_layer_0)
        copied = {start for start, _, kv in stored if _is_copied(kv, geometry)}
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
        self._tasks = [in_daemon_thread(self._read_all, THREAD_NAME) for _ in range(threads)]

    def fetch_kv(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
        """Load a chunk's layer to the positions from `start` to `stop` of the prompt (the paper's `fetch_kv`). Thread-safe."""
        if _is_copied(kv, self._geometry):
            kv.copy_layer(layer, buffer.layer_kv.kv_21HND[:, 0, :, start:stop])
        else:
            self._staging.load(kv, layer, buffer, start, stop)

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over; once for every layer, in order.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        self._copy(layer)
        with self._changed:
            self._changed.wait_for(lambda: not self._missing[layer] or self._error is not None or self._stopped)
            if self._error is not None:
                raise self._error
            if self._stopped:
                raise FusionCancelledError(f"loading was stopped before layer {layer} arrived")
            buffer = self._buffers.pop(layer)
            self._consumed = layer + 1
            if layer + self._lookahead < self._geometry.layers:
                self._allocate(layer + self._lookahead)
            self._changed.notify_all()
        return buffer.wait()

    def close(self) -> None:
        """Stop loading, wait for the threads to be done, and drop what was loaded. Reads under way are read to their end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for task in self._tasks:
            task.result()
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)  # one may be the fusor's own
        self._buffers.clear()
        self._error = None  # its traceback holds a layer and this loader

    def _over(self) -> bool:
        return self._stopped or self._error is not None or self._next_read == len(self._reads)

    def _allocate(self, layer: int) -> None:
        """Allocate a layer's buffer; a layer without reads is ready at once, before other layers' copies are issued."""
        self._buffers[layer] = self._staging.buffer(self._tokens, layer)
        if not self._missing[layer]:
            self._staging.finish(self._buffers[layer])

    def _copy(self, layer: int) -> None:
        """Copy a layer's entries that are in memory, in this thread."""
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
            self._error = error  # threads stop reading
            raise
        finally:
            with self._changed:
                self._end()

    def _read_all(self) -> None:
        """Read in this thread until no read is left.

        A finished read is entered and the next one begun under one lock: between two locks another thread would get it, and
        this thread would wait.
        """
        with self._changed:
            read = self._take()
        while read is not None:
            failed: BaseException | None = None
            try:
                self.fetch_kv(read.kv, read.layer, self._buffers[read.layer], read.start, read.stop)
            except BaseException as error:  # the fusor's thread raises it
                failed = error
            with self._changed:
                self._enter(read, failed)
                read = self._take()

    def _take(self) -> LayerRead | None:
        """Wait for a read within the look-ahead, and begin it; None when no read is left. The lock is held."""
        self._changed.wait_for(lambda: self._over() or self._reads[self._next_read].layer < self._consumed + self._lookahead)
        if self._over():
            return None
        self._begin()
        self._next_read += 1
        return self._reads[self._next_read - 1]

    def _enter(self, read: LayerRead, failed: BaseException | None) -> None:
        """Enter a finished read; after its last read the layer is ready."""
        self._end()
        if failed is not None:
            self._error = self._error or failed
            self._changed.notify_all()
            return
        self._done.append(read)
        self._missing[read.layer] -= 1
        if not self._missing[read.layer]:
            self._staging.finish(self._buffers[read.layer])
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


def _is_copied(kv: KVHandle, geometry: KVGeometry) -> bool:
    """Whether the fusor's thread copies a chunk's layers, since no device is waited for; else threads load them ahead."""
    return kv.in_memory and geometry.device.type == "cpu"
