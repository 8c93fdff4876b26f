"""How a loaded layer gets from host memory to its place on the model's device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cacheblend.blend import KVGeometry, LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A layer that is on its way: `wait` makes the caller's stream wait for the copy, not the host."""

    whole: LayerKV
    copied: torch.cuda.Event | None
    pinned: tuple[torch.Tensor, ...] = ()

    def wait(self) -> LayerKV:
        """The layer, safe to use on the current stream."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.whole.k_1HND.device)
            stream.wait_event(self.copied)
            for tensor in (self.whole.k_1HND, self.whole.v_1HND):
                tensor.record_stream(stream)
        return self.whole


class Staging:
    """Copies chunks to their place: on the CPU directly, on CUDA through pinned memory on a stream of its own.

    The caching host allocator keeps a pinned block from reuse until the copies recorded on it are done, so a layer's staging
    memory is returned without a device-wide synchronise.
    """

    def __init__(self, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._stream = _copy_stream(geometry.device) if geometry.device.type == "cuda" else None
        self._pinned: list[torch.Tensor] = []

    def room(self, tokens: int) -> LayerKV:
        """Room for a layer, safe to copy to.

        On CUDA it belongs to the copies' stream: memory of the fusor's stream may be handed out while kernels queued there
        still write to it, and the copies do not wait for them.
        """
        if self._stream is None:
            return LayerKV.empty(self._geometry, tokens)
        with torch.cuda.stream(self._stream):
            return LayerKV.empty(self._geometry, tokens)

    def place(self, whole: LayerKV, start: int, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> None:
        """Copy a chunk's keys and values to the positions from `start` on."""
        if self._stream is None:
            whole.place(start, k_HTD, v_HTD)
            return
        with torch.cuda.stream(self._stream):
            pinned = [x_HTD if x_HTD.is_cuda else x_HTD.pin_memory() for x_HTD in (k_HTD, v_HTD)]
            self._pinned += pinned
            whole.place(start, *pinned, non_blocking=True)

    def arrive(self, whole: LayerKV) -> Arrival:
        """Close a layer: all of its copies have been issued."""
        if self._stream is None:
            return Arrival(whole, None)
        pinned, self._pinned = tuple(self._pinned), []
        return Arrival(whole, self._stream.record_event(), pinned)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: the allocator keeps free memory apart by stream, and their copies share a bus in any case."""
    return torch.cuda.Stream(device)
