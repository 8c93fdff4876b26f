"""Memory for a layer's KV; on the CPU large pieces come in huge pages where the system has them, and are used again.

The first touch of new memory costs more than the copy into it: 72 MB took 85 ms of processor time in pages of 4 KiB, 18 in
pages of 2 MiB, and where a virtual machine must ask its host for them, several times that. So what a finished prompt leaves is
kept for the next one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref

import numpy as np
import torch

HUGE_PAGE_BYTES = 2 * 2**20
# Room behind a prompt for what is generated, which then needs no copy of the prompt's KV; as much again when that is full.
GROWTH_TOKENS = 128
FREE_BYTES = 256 * 2**20  # kept at most for the next prompts, in a process

_free: list[mmap.mmap] = []
_changing = threading.RLock()  # any line may collect a tensor, whose memory then comes back in the same thread


def empty_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, not initialised."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = _take(count)
    in_use = np.frombuffer(memory, np.uint8)  # lives as long as the last tensor over it
    weakref.finalize(in_use, _give_back, memory).atexit = False
    return torch.frombuffer(in_use, dtype=dtype, count=math.prod(shape)).view(shape)


def _take(count: int) -> mmap.mmap:
    with _changing:
        for memory in sorted((memory for memory in _free if count <= len(memory) <= 2 * count), key=len):
            with contextlib.suppress(ValueError):
                _free.remove(memory)
                return memory
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap) -> None:
    with _changing:
        _free.append(memory)
        while sum(map(len, _free)) > FREE_BYTES:
            del _free[0]
