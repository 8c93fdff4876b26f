"""How a chunk's stored layer gets to its place in the whole prompt's layer on the model's device.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from cacheblend.base.host_bytes import Bytes, host_bytes
from cacheblend.blend import KVGeometry, LayerKV
from cacheblend.store import ChunkKV, Placement, PrefixRun


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Room for a prompt's layer; on the CPU also as the bytes of its keys and values, B to a head's vector."""

    whole: LayerKV
    bytes_2HNB: Bytes | None


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

    def room(self, tokens: int) -> Room:
        """Room for a layer, safe to copy to.

        On CUDA it belongs to the copies' stream: memory of the fusor's stream may be handed out while kernels queued there
        still write to it, and the copies do not wait for them.
        """
        if self._stream is None:
            whole = LayerKV.empty(self._geometry, tokens)
            return Room(whole, host_bytes(whole.kv_21HND)[:, 0])
        with torch.cuda.stream(self._stream):
            return Room(LayerKV.empty(self._geometry, tokens), None)

    def bring(self, kv: Placement | PrefixRun | ChunkKV, layer: int, room: Room, start: int, stop: int) -> None:
        """Read a chunk's layer to the positions from `start` to `stop`.

        Encoded KV goes to a GPU as it is stored, and is decoded there.
        """
        if room.bytes_2HNB is not None:
            _read(kv, layer, room.bytes_2HNB[:, :, start:stop])
            return
        kv_2HTD = room.whole.kv_21HND[:, 0, :, start:stop]
        if isinstance(kv, Placement) and not kv.raw:
            pinned = kv.read_encoded(layer).pin_memory()
            with torch.cuda.stream(self._stream):
                decoded = kv.decode(layer, pinned.to(kv_2HTD.device, non_blocking=True))
                for to_HTD, x_HTD in zip(kv_2HTD, decoded, strict=True):
                    to_HTD.copy_(x_HTD)
            return
        pinned_2HTD = torch.empty(kv_2HTD.shape, dtype=kv_2HTD.dtype, pin_memory=True)
        _read(kv, layer, host_bytes(pinned_2HTD))
        with torch.cuda.stream(self._stream):
            kv_2HTD.copy_(pinned_2HTD, non_blocking=True)

    def copy(self, kv: Placement | PrefixRun | ChunkKV, layer: int, room: Room, start: int, stop: int) -> None:
        """`bring` for KV in memory and a room on the CPU, by all processors that PyTorch computes with in this thread."""
        if isinstance(kv, PrefixRun):
            self.bring(kv, layer, room, start, stop)
        elif isinstance(kv, Placement) and kv.raw:
            room.whole.kv_21HND[:, 0, :, start:stop].copy_(kv.read_encoded(layer))
        else:
            room.whole.place(start, *(kv.layers[layer] if isinstance(kv, ChunkKV) else kv.read_layer(layer)))

    def arrive(self, room: Room) -> Arrival:
        """Close a layer: all of its copies have been issued."""
        return Arrival(room.whole, None if self._stream is None else self._stream.record_event())


def _read(kv: Placement | PrefixRun | ChunkKV, layer: int, to_2HTB: Bytes) -> None:
    """Read a chunk's layer to CPU memory."""
    if not isinstance(kv, ChunkKV):
        kv.read_layer_into(layer, to_2HTB)
        return
    for to_HTB, x_HTD in zip(to_2HTB, kv.layers[layer], strict=True):
        x_HTD = x_HTD.detach().cpu()
        # A copy by PyTorch would give this thread a team of its own for parallel regions, which slows everybody else's.
        np.copyto(to_HTB, host_bytes(x_HTD if x_HTD.stride(-1) == 1 else x_HTD.contiguous()))


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: the allocator keeps free memory apart by stream, and their copies share a bus in any case."""
    return torch.cuda.Stream(device)
