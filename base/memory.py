"""CPU memory as bytes; a pool of large buffers, in huge pages where the system has them, that all threads use again; and what
the C library holds of freed memory.

The first touch of new memory costs more than the copy into it, and the C library gives freed memory again only to the thread
that asked for it first, while KV goes from thread to thread. So freed buffers are cached here.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE_BYTES = 2 * 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
FREED_BYTES = 2**30  # that the C library may hold
OWN_MAPPING_BYTES = 32 * 2**20  # the largest value that glibc takes
ARENAS = 2  # of memory; glibc's eight a processor each keep what threads that have ended freed there


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """View a CPU tensor as bytes; the last axis, which must be contiguous, counts bytes instead of numbers."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return view


class BufferPool:
    """Anonymous memory that is used again by whoever asks next. Thread-safe.

    Args:
        max_cached_bytes: cached at most while nobody uses it.
        slack: a cached buffer may be so many times as large as asked for.
    """

    def __init__(self, max_cached_bytes: int, slack: float) -> None:
        self.max_cached_bytes, self.slack = max_cached_bytes, slack
        self.cached: list[mmap.mmap] = []
        self._lock = threading.RLock()  # any line may collect an array, whose memory then comes back in the same thread

    def empty(self, count: int) -> Bytes:
        """`count` bytes, not initialised, that begin on a page; worth it from `HUGE_PAGE_BYTES` on.

        Raises:
            MemoryError: the system has no more.
        """
        memory = self._allocate(count)
        in_use = np.frombuffer(memory, np.uint8)  # lives as long as the last view of it
        weakref.finalize(in_use, self._release, memory).atexit = False
        return in_use[:count]

    def _allocate(self, count: int) -> mmap.mmap:
        with self._lock:
            for memory in sorted((memory for memory in self.cached if count <= len(memory) <= self.slack * count), key=len):
                with contextlib.suppress(ValueError):
                    self.cached.remove(memory)
                    return memory
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {count} bytes of memory left") from error
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _release(self, memory: mmap.mmap) -> None:
        # A collection may run in a thread with locks of its own: it does not wait for this one, and the memory is let go.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self.cached.append(memory)
            while sum(map(len, self.cached)) > self.max_cached_bytes:
                del self.cached[0]
        finally:
            self._lock.release()


def hold_freed_memory() -> None:
    """Have the C library hold up to `FREED_BYTES` of freed memory, but for large blocks, for any thread's next request.

    A prefill frees its activations layer by layer, and the first touch of new memory is dear. Does nothing
    where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
    mallopt(M_TRIM_THRESHOLD, FREED_BYTES)
    mallopt(M_ARENA_MAX, ARENAS)


def return_freed_memory() -> None:
    """Hand back what `hold_freed_memory` holds, after work that is larger than a prefill's."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return
    trim(0)
