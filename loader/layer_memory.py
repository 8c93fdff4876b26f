"""CPU memory for a layer's KV, in huge pages where the system has them.

The first touch of new memory costs more than the copy into it: 72 MB took 85 ms of processor time in pages of 4 KiB, and 18 in
pages of 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from cacheblend.blend import KVGeometry, LayerKV

HUGE_PAGE_BYTES = 2 * 2**20


def new_layer(geometry: KVGeometry, tokens: int) -> LayerKV:
    """Room for a layer of `tokens` tokens on the CPU; what it holds is not defined."""
    count = geometry.layer_bytes(tokens)
    if count < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return LayerKV.empty(geometry, tokens)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # unmapped when the last tensor over it goes
    with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    k_1HND, v_1HND = torch.frombuffer(memory, dtype=geometry.dtype).view(2, 1, geometry.kv_heads, tokens, geometry.head_dim)
    return LayerKV(k_1HND, v_1HND)
