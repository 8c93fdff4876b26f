"""Memory for a layer's KV; what a finished prompt leaves is kept for the next one."""

from __future__ import annotations

import math

import torch

from cacheblend.base.buffer_pool import HUGE_PAGE_BYTES, KeptMemory

# Room behind a prompt for what is generated, which then needs no copy of the prompt's KV; as much again when that is full.
GROWTH_TOKENS = 128
LAYERS = KeptMemory(256 * 2**20, slack=2)  # a prompt of half the length takes another's memory as well


def empty_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, not initialised."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(LAYERS.empty(count)).view(dtype).view(shape)
