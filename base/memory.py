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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def host_bytes(tensor: torch.Tensor) -> Bytes:
    """A view of the bytes; the last axis, which must be contiguous, counts bytes instead of numbers."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = tensor.view(torch.uint8).numpy()
    return view


HUGE_PAGE_BYTES = 2 * 2**20


class KeptMemory:
    """Pieces that are used again by whoever asks next. Thread-safe.

    Args:
        most_free: bytes kept at most that nobody has.
        slack: what is used again may be so many times as large as asked for.
    """

    def __init__(self, most_free: int, slack: float) -> None:
        self.most_free, self.slack = most_free, slack
        self.free: list[mmap.mmap] = []
        self._changing = threading.RLock()  # any line may collect an array, whose memory then comes back in the same thread

    def empty(self, count: int) -> Bytes:
        """`count` bytes, not initialised, that begin on a page; worth it from `HUGE_PAGE_BYTES` on.

        Raises:
            MemoryError: the system has no more.
        """
        memory = self._take(count)
        in_use = np.frombuffer(memory, np.uint8)  # lives as long as the last view of it
        weakref.finalize(in_use, self._give_back, memory).atexit = False
        return in_use[:count]

    def _take(self, count: int) -> mmap.mmap:
        with self._changing:
            for memory in sorted((memory for memory in self.free if count <= len(memory) <= self.slack * count), key=len):
                with contextlib.suppress(ValueError):
                    self.free.remove(memory)
                    return memory
        try:
            memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the system has no {count} bytes of memory left") from error
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _give_back(self, memory: mmap.mmap) -> None:
        # A collection may run in a thread with locks of its own: it does not wait for this one, and the memory is let go.
        if not self._changing.acquire(blocking=False):
            return
        try:
            self.free.append(memory)
            while sum(map(len, self.free)) > self.most_free:
                del self.free[0]
        finally:
            self._changing.release()
