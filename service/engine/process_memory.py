"""How a process that serves keeps memory: what one request frees, the next one takes."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 2**30
OWN_MAPPING_BYTES = 32 * 2**20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Have the C library keep up to `KEPT_BYTES` of freed memory, but for large pieces, instead of handing it back at once.

    A prefill's activations are freed layer by layer, and memory that comes anew from the system costs its first touch: on a
    virtual machine, 6,000 page faults and a twentieth of a blend's time. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
