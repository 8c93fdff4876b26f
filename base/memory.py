"""CPU memory as bytes, and a pool of large buffers, in huge pages where the system has them, that all threads use again.

The first touch of new memory costs more than the copy into it, and the C library gives freed memory again only to the thread
that asked for it first, while KV goes from thread to thread (docs/lab-notes). So freed buffers are cached here.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE_BYTES = 2 * 2**20


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
