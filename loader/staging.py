"""How a chunk's stored layer gets to its place in the whole prompt's layer on the model's device.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cacheblend.blend import KVGeometry, LayerKV
from cacheblend.store import ChunkKV, Placement, PrefixRun


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A layer that is on its way: `wait` makes the caller's stream wait for the copy, not the host."""

    whole: LayerKV
    copied: torch.cuda.Event | None

    def wait(self) -> LayerKV:
        """The layer, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.whole.k_1HND.device)
            stream.wait_event(self.copied)
            for tensor in (self.whole.k_1HND, self.whole.v_1HND):
                tensor.record_stream(stream)
        return self.whole


class Staging:
    """Brings chunks to their place: on the CPU straight there, on CUDA through pinned memory on a stream of its own.

    Used by several threads at once, each for chunks of its own. The caching host allocator keeps a pinned block from reuse
    until the copies recorded on it are done, so staging memory is returned without a device-wide synchronise.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._stream = _copy_stream(geometry.device) if geometry.device.type == "cuda" else None

    def room(self, tokens: int) -> LayerKV:
        """Room for a layer, safe to copy to.

        On CUDA it belongs to the copies' stream: memory of the fusor's stream may be handed out while kernels queued there
        still write to it, and the copies do not wait for them.
        """
        with torch.cuda.stream(self._stream):
            return LayerKV.empty(self._geometry, tokens)

    def bring(self, kv: Placement | PrefixRun | ChunkKV, layer: int, whole: LayerKV, start: int, stop: int) -> None:
        """Read a chunk's layer to the positions from `start` to `stop`.

        Encoded KV goes to a GPU as it is stored, and is decoded there.
        """
        k_HTD, v_HTD = whole.k_1HND[0, :, start:stop], whole.v_1HND[0, :, start:stop]
        if self._stream is None:
            _read(kv, layer, k_HTD, v_HTD)
            return
        if isinstance(kv, Placement) and not kv.raw:
            pinned = kv.read_encoded(layer).pin_memory()
            with torch.cuda.stream(self._stream):
                decoded = kv.decode(layer, pinned.to(k_HTD.device, non_blocking=True))
                for to_HTD, x_HTD in zip((k_HTD, v_HTD), decoded, strict=True):
                    to_HTD.copy_(x_HTD)
            return
        pinned_2HTD = torch.empty((2, *k_HTD.shape), dtype=k_HTD.dtype, pin_memory=True)
        _read(kv, layer, pinned_2HTD[0], pinned_2HTD[1])
        with torch.cuda.stream(self._stream):
            k_HTD.copy_(pinned_2HTD[0], non_blocking=True)
            v_HTD.copy_(pinned_2HTD[1], non_blocking=True)

    def arrive(self, whole: LayerKV) -> Arrival:
        """Close a layer: all of its copies have been issued."""
        return Arrival(whole, None if self._stream is None else self._stream.record_event())


def _read(kv: Placement | PrefixRun | ChunkKV, layer: int, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> None:
    """Read a chunk's layer to CPU memory."""
    if not isinstance(kv, ChunkKV):
        kv.read_layer_into(layer, k_HTD, v_HTD)
        return
    for to_HTD, x_HTD in zip((k_HTD, v_HTD), kv.layers[layer], strict=True):
        to_HTD.copy_(x_HTD)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: the allocator keeps free memory apart by stream, and their copies share a bus in any case."""
    return torch.cuda.Stream(device)
