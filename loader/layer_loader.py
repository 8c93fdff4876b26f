"""The thread that brings layer i+1's stored KV while layer i is computed (paper §5, §6).

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import defaultdict
from types import TracebackType
from typing import Self

import torch

from cacheblend.blend import KVGeometry, LayerKV, Prompt, SegmentKV
from cacheblend.store import ChunkKV, Placement
from cacheblend.store.errors import FusionCancelledError

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
        self._consumed = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.bytes_by_tier: dict[str, int] = defaultdict(int)
        self.seconds_by_tier: dict[str, float] = defaultdict(float)

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load; see `LayerSource.start`."""
        if self._thread is not None:
            raise RuntimeError("a LayerLoader serves one fusion; make one for each")
        self._prompt, self._geometry, self._reuse_layer_0 = prompt, geometry, reuse_layer_0
        self._staging = Staging(geometry)
        self._thread = threading.Thread(target=self._load_all, name="layer-loader", daemon=True)
        self._thread.start()

    def fetch_kv(self, kv: SegmentKV, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`k_HTD`, `v_HTD` of one chunk's layer, on the CPU, keys position-free (the paper's `fetch_kv`)."""
        if isinstance(kv, Placement):
            return kv.read_layer(layer)
        if isinstance(kv, ChunkKV):
            return kv.layers[layer]
        raise TypeError(f"segments must bring a Placement or a ChunkKV, not {type(kv).__name__}")

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until the layer is on the device, and hand it over.

        Raises:
            FusionCancelledError: the loader was closed meanwhile.
            DamagedEntryError: a stored entry's bytes are not the ones written; it is a miss from now on.
        """
        with self._changed:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._thread is not None and not self._stopped:
            warnings.warn("a LayerLoader was not closed; use it as a context manager", ResourceWarning, stacklevel=2)
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _load_all(self) -> None:
        try:
            for layer in range(self._geometry.layers):
                with self._changed:
                    while layer >= self._consumed + self._lookahead and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        return
                arrival = self._load(layer)
                with self._changed:
                    self._ready[layer] = arrival
                    self._changed.notify_all()
        except BaseException as error:  # travels to the fusor, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _load(self, layer: int) -> Arrival:
        whole = LayerKV.empty(self._geometry, len(self._prompt))
        for start, _, kv in self._prompt.cached(exact_only=layer == 0 and not self._reuse_layer_0):
            if self._stopped:
                break
            started = time.perf_counter()
            k_HTD, v_HTD = self.fetch_kv(kv, layer)
            self._staging.place(whole, start, k_HTD, v_HTD)
            tier = kv.tier if isinstance(kv, Placement) else "memory"
            self.bytes_by_tier[tier] += k_HTD.nbytes + v_HTD.nbytes
            self.seconds_by_tier[tier] += time.perf_counter() - started
        return self._staging.arrive(whole)
