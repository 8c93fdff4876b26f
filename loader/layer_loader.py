"""The thread that brings layer i+1's stored KV while layer i is computed (paper §5, §6).

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import defaultdict
from types import TracebackType
from typing import Self

import torch

from cacheblend.blend import KVGeometry, LayerKV, Prompt, SegmentKV
from cacheblend.store import ChunkKV, Placement
from cacheblend.store.errors import FusionCancelledError, IncompatibleKVError

from .staging import Arrival, Staging


class LayerLoader:
    """Loads a prompt's stored KV layer by layer, at most `lookahead_layers` ahead of the fusor.

    A `LayerSource` for `Fusor.fuse`: segments may bring `Placement`s of either tier, or `ChunkKV`s in memory, mixed. The
    paper's three calls are `fetch_kv` and `synchronize` here, and `Decoder.run_rows` (`prefill_layer`) in the fusor. An error
    while loading is raised by `synchronize`; closing stops the thread. Use it as a context manager, inside the stores' pin.

    Args:
        lookahead_layers: see `LoaderConfig`.
    """

    def __init__(self, lookahead_layers: int = 2) -> None:
        self._lookahead = lookahead_layers
        self._changed = threading.Condition()
        self._ready: dict[int, Arrival] = {}
        self._loaded, self._consumed = 0, 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.bytes_by_tier: dict[str, int] = defaultdict(int)
        self.load_s = 0.0

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load; see `LayerSource.start`.

        Raises:
            FusionCancelledError: the loader was closed before.
            IncompatibleKVError: a chunk's KV does not have the model's number of layers.
        """
        if self._thread is not None:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        if self._stopped:
            raise FusionCancelledError("the loader was closed before the fusion began")
        for start, _, kv in prompt.cached():
            layers = kv.layers if isinstance(kv, Placement) else len(kv.layers) if isinstance(kv, ChunkKV) else geometry.layers
            if layers != geometry.layers:
                raise IncompatibleKVError(
                    f"the KV at position {start} has {layers} layers and the model {geometry.layers}; precompute it with this "
                    "model"
                )
        self._prompt, self._geometry, self._reuse_layer_0 = prompt, geometry, reuse_layer_0
        self._staging = Staging(geometry)
        thread = threading.Thread(target=_load_all, args=(weakref.ref(self), self._changed), name="layer-loader", daemon=True)
        thread.start()
        self._thread = thread

    def fetch_kv(self, kv: SegmentKV, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`k_HTD`, `v_HTD` of one chunk's layer, on the CPU, keys position-free (the paper's `fetch_kv`)."""
        if isinstance(kv, Placement):
            return kv.read_layer(layer)
        if isinstance(kv, ChunkKV):
            return kv.layers[layer]
        raise TypeError(f"segments must bring a Placement or a ChunkKV, not {type(kv).__name__}")

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over; once for every layer, in order.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        if layer != self._consumed:
            raise RuntimeError(f"layers are handed over in order: layer {self._consumed} is next, not {layer}")
        with self._changed:
            if self._thread is None and not self._stopped:
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
        """Stop loading, wait for the thread, and drop what was loaded. A layer that is being read is read to its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._ready.clear()
        self._error = None  # its traceback holds a layer and this loader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._thread is not None and not self._stopped:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            warnings.warn("a LayerLoader was not closed; use it as a context manager", ResourceWarning, stacklevel=2)

    def _may_load(self) -> bool:
        """Whether the thread has something to do: a layer within the look-ahead, or to end."""
        return self._loaded < self._consumed + self._lookahead or self._stopped

    def _load_next(self) -> bool:
        """Load a layer, in the thread; False where it was the last one."""
        if self._stopped:
            return False
        try:
            arrival = self._load(self._loaded)
        except BaseException as error:  # travels to the fusor, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return False
        with self._changed:
            self._ready[self._loaded] = arrival
            self._loaded += 1
            self._changed.notify_all()
        return self._loaded < self._geometry.layers

    def _load(self, layer: int) -> Arrival:
        geometry = self._geometry
        whole = self._staging.room(len(self._prompt))
        for start, stop, kv in self._prompt.cached(exact_only=layer == 0 and not self._reuse_layer_0):
            if self._stopped:
                break
            started = time.perf_counter()
            k_HTD, v_HTD = self.fetch_kv(kv, layer)
            if k_HTD.shape != (geometry.kv_heads, stop - start, geometry.head_dim):  # copying would broadcast one head to all
                raise IncompatibleKVError(
                    f"the KV at position {start} is {tuple(k_HTD.shape)} (heads, tokens, head size) and the model needs "
                    f"{(geometry.kv_heads, stop - start, geometry.head_dim)}; precompute it with this model"
                )
            self._staging.place(whole, start, k_HTD, v_HTD)
            tier, loaded_bytes = "memory", k_HTD.nbytes + v_HTD.nbytes
            if isinstance(kv, Placement):
                tier, loaded_bytes = kv.tier, kv.layer_bytes(layer)
            self.bytes_by_tier[tier] += loaded_bytes
            self.load_s += time.perf_counter() - started
        return self._staging.arrive(whole)


def _load_all(reference: weakref.ref[LayerLoader], changed: threading.Condition) -> None:
    """The thread: it holds the loader only while it loads, so that one that was dropped unclosed is collected, and warns."""

    def may_go_on() -> bool:
        loader = reference()
        return loader is None or loader._may_load()

    going_on = True
    while going_on:
        with changed:
            changed.wait_for(may_go_on)
        loader = reference()
        going_on = loader is not None and loader._load_next()
        del loader
