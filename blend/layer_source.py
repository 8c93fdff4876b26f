"""Sources of a prompt's stored KV, layer by layer, and the layers' buffers.

Shapes: H KV heads, N tokens of the prompt, T tokens of a chunk, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from cacheblend.base.errors import IncompatibleKVError
from cacheblend.base.memory import HUGE_PAGE_BYTES, BufferPool

if TYPE_CHECKING:
    from .prompt import Prompt

GROWTH_TOKENS = 128  # room after a prompt for generated tokens, which then need no copy of its KV; extended by as many
LAYERS = BufferPool(256 * 2**20, slack=2)  # a prompt of half the length can reuse a buffer


def empty_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, not initialised."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(LAYERS.empty(count)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape, dtype and device of one layer's keys, and of its values."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in one layer."""
        return 2 * self.kv_heads * self.head_dim * tokens * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's keys and values of a prompt, on the model's device, in one tensor, so that a chunk is one copy.

    As a source returns it, cached positions hold stored values (keys not yet rotated, except a `PrefixRun`'s) and the
    others are not initialised. `memory_21HCD` has C > N positions: room after the prompt for generated tokens.
    """

    kv_21HND: torch.Tensor
    memory_21HCD: torch.Tensor

    @classmethod
    def empty(cls, geometry: KVGeometry, tokens: int) -> LayerKV:
        """Room for `tokens` tokens, not initialised."""
        shape = (2, 1, geometry.kv_heads, tokens + GROWTH_TOKENS, geometry.head_dim)
        memory_21HCD = empty_layer(shape, geometry.dtype, geometry.device)
        return cls(memory_21HCD[:, :, :, :tokens], memory_21HCD)

    @property
    def k_1HND(self) -> torch.Tensor:
        """The keys."""
        return self.kv_21HND[0]

    @property
    def v_1HND(self) -> torch.Tensor:
        """The values."""
        return self.kv_21HND[1]

    def put(self, positions_S: torch.Tensor, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor) -> None:
        """Copy keys and values to these positions."""
        self.k_1HND.index_copy_(2, positions_S, k_1HSD)
        self.v_1HND.index_copy_(2, positions_S, v_1HSD)

    def place(self, start: int, k_HTD: torch.Tensor, v_HTD: torch.Tensor, *, non_blocking: bool = False) -> None:
        """Copy a chunk's keys and values to the positions from `start` on."""
        stop = start + k_HTD.shape[1]
        self.k_1HND[0, :, start:stop].copy_(k_HTD, non_blocking=non_blocking)
        self.v_1HND[0, :, start:stop].copy_(v_HTD, non_blocking=non_blocking)


class LayerSource(Protocol):
    """Loads the stored KV of a prompt's segments, layer by layer, from 0 up."""

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load. Without `reuse_layer_0` layer 0 reads only exact segments: all other tokens run through it."""

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until this layer's KV is on the device, and return it (the paper's `synchronize`, §6)."""


def check_shape(prompt: Prompt, geometry: KVGeometry) -> None:
    """Refuse KV of another shape than the model's, since loading copies bytes.

    Raises:
        IncompatibleKVError: number of layers, heads, head size or dtype differ.
    """
    needed = geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype
    for start, _, kv in prompt.cached():
        shapes = {(kv.num_layers, *kv.heads(layer), kv.dtype) for layer in range(kv.num_layers)}
        if shapes != {needed}:
            raise IncompatibleKVError(
                f"the KV at position {start} has (layers, heads, head size, dtype) {sorted(shapes, key=str)} and the model "
                f"{needed}; precompute it with this model"
            )


class ResidentLayers:
    """A source for KV in memory, which copies a layer at its `synchronize`."""

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Check the KV's shape.

        Raises:
            IncompatibleKVError: a chunk's KV does not have the model's shape.
        """
        check_shape(prompt, geometry)
        self._prompt, self._geometry, self._reuse_layer_0 = prompt, geometry, reuse_layer_0

    def synchronize(self, layer: int) -> LayerKV:
        """Copy the layer of every cached segment to its place."""
        layer_kv = LayerKV.empty(self._geometry, len(self._prompt))
        for start, stop, kv in self._prompt.cached(exact_only=layer == 0 and not self._reuse_layer_0):
            kv.copy_layer(layer, layer_kv.kv_21HND[:, 0, :, start:stop])
        return layer_kv
