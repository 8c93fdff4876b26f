"""CPU memory: a pool of large buffers for all threads, and the C library's freed memory.

The first touch of new memory costs more than the copy into it. The C library reuses freed memory only in the thread that
allocated it, while KV goes from thread to thread. So freed buffers are pooled here, in huge pages where the system has them.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE_BYTES = 2 * 2**20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
FREED_BYTES = 2**30  # freed memory that the C library may hold
OWN_MAPPING_BYTES = 32 * 2**20  # the largest value that glibc accepts
ARENAS = 2  # glibc's default of eight a processor would each hold memory that ended threads freed


class BufferPool:
    """Anonymous memory that is reused by the next caller. Thread-safe.

    Args:
        max_cached_bytes: limit of unused memory in the pool.
        slack: a cached buffer serves a request that is smaller by at most this factor.
    """

    def __init__(self, max_cached_bytes: int, slack: float) -> None:
        self.max_cached_bytes, self.slack = max_cached_bytes, slack
        self.cached: list[mmap.mmap] = []
        self._lock = threading.RLock()  # any line may collect an array, whose memory then comes back in the same thread

    def empty(self, count: int) -> Bytes:
        """`count` bytes, not initialised, that begin on a page; useful from `HUGE_PAGE_BYTES` on.

        Raises:
            MemoryError: the system has no memory left.
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
        # A garbage collection may run in a thread that holds other locks: it does not wait for this one, and frees the memory.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self.cached.append(memory)
            while sum(map(len, self.cached)) > self.max_cached_bytes:
                del self.cached[0]
        finally:
            self._lock.release()


def hold_freed_memory() -> None:
    """Have the C library hold up to `FREED_BYTES` of freed memory, large blocks excepted, for the next request of any thread.

    A prefill frees its activations layer by layer, and the first touch of new memory is expensive. Without glibc this does
    nothing.
    """
    if mallopt := _of_c_library("mallopt"):
        mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(M_TRIM_THRESHOLD, FREED_BYTES)
        mallopt(M_ARENA_MAX, ARENAS)


def return_freed_memory() -> None:
    """Return the memory that `hold_freed_memory` holds to the system, after work that is larger than a prefill's."""
    if trim := _of_c_library("malloc_trim"):
        trim(0)


def _of_c_library(name: str) -> Any:
    """A function of glibc; None where the C library is another one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return None
