"""Large pieces of the CPU's memory, in huge pages where the system has them, which all threads use again.

The first touch of new memory costs more than the copy into it: 72 MB took 85 ms of processor time in pages of 4 KiB, 18 in
pages of 2 MiB, and where a virtual machine must ask its host for them 2 to 3 ms a megabyte. The C library gives freed memory
again to the thread that asked for it first alone, and KV goes from thread to thread. So what nobody has any more is kept here.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref

import numpy as np

from .host_bytes import Bytes

HUGE_PAGE_BYTES = 2 * 2**20
FREE_BYTES = 256 * 2**20  # kept at most, in a process

_free: list[mmap.mmap] = []
_changing = threading.RLock()  # any line may collect an array, whose memory then comes back in the same thread


def empty_bytes(count: int, most: float) -> Bytes:
    """Memory of `count` bytes, not initialised, that begins on a page; worth it from `HUGE_PAGE_BYTES` on.

    Args:
        count: bytes.
        most: what is used again may be so many times as large as asked for.
    """
    memory = _take(count, most)
    in_use = np.frombuffer(memory, np.uint8)  # lives as long as the last view of it
    weakref.finalize(in_use, _give_back, memory).atexit = False
    return in_use[:count]


def _take(count: int, most: float) -> mmap.mmap:
    with _changing:
        for memory in sorted((memory for memory in _free if count <= len(memory) <= most * count), key=len):
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
