"""Memory for a layer's KV; what a finished prompt leaves is kept for the next one."""

from __future__ import annotations

import math

import torch

from cacheblend.store import kept_memory

# Room behind a prompt for what is generated, which then needs no copy of the prompt's KV; as much again when that is full.
GROWTH_TOKENS = 128
REUSED_FOR = 2  # a prompt of half the length takes another's memory as well


def empty_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, not initialised."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < kept_memory.HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(kept_memory.empty_bytes(count, REUSED_FOR)).view(dtype).view(shape)
