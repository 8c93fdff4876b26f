"""Memory for a prompt's layers, and the way of a chunk's layer to its place in it: on CUDA through pinned memory.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cacheblend.base.memory import host_bytes
from cacheblend.blend import LayerKV

if TYPE_CHECKING:
    from cacheblend.base.memory import Bytes
    from cacheblend.blend import KVGeometry
    from cacheblend.store import KVHandle


@dataclass(frozen=True, slots=True, eq=False)
class LayerBuffer:
    """Memory for a prompt's layer; on the CPU also as the bytes of its keys and values, B to a head's vector."""

    layer_kv: LayerKV
    bytes_2HNB: Bytes | None


@dataclass(frozen=True, slots=True, eq=False)
class PendingLayer:
    """A layer that is being loaded: `wait` makes the caller's stream wait for the copy, not the host."""

    layer_kv: LayerKV
    copied: torch.cuda.Event | None

    def wait(self) -> LayerKV:
        """The layer, safe to use on the current stream."""
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

    def buffer(self, tokens: int) -> LayerBuffer:
        """Memory for a layer, safe to copy to.

        On CUDA it belongs to the copies' stream: memory of the fusor's stream may be handed out while kernels queued there
        still write to it, and the copies do not wait for them.
        """
        if self._stream is None:
            layer_kv = LayerKV.empty(self._geometry, tokens)
            return LayerBuffer(layer_kv, host_bytes(layer_kv.kv_21HND)[:, 0])
        with torch.cuda.stream(self._stream):
            return LayerBuffer(LayerKV.empty(self._geometry, tokens), None)

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

    def finish(self, buffer: LayerBuffer) -> PendingLayer:
        """Close a layer: all of its copies have been issued."""
        return PendingLayer(buffer.layer_kv, None if self._stream is None else self._stream.record_event())


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: the allocator keeps free memory apart by stream, and their copies share a bus in any case."""
    return torch.cuda.Stream(device)
