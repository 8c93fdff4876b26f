"""Memory and threads of a process that serves: what it holds of both, and at which priority its threads run."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
FREED_BYTES = 2**30  # that the C library may hold
OWN_MAPPING_BYTES = 32 * 2**20  # the largest value that glibc takes
ARENAS = 2  # of memory; glibc's eight a processor each keep what threads that have ended freed there
LOW_PRIORITY_NICENESS = 10  # a tenth of the weight of a thread at 0


def hold_freed_memory() -> None:
    """Have the C library hold up to `FREED_BYTES` of freed memory, but for large blocks, for any thread's next request.

    A prefill frees its activations layer by layer, and the first touch of new memory is dear (docs/lab-notes). Does nothing
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


def lower_priority() -> None:
    """Have the calling thread, and those it starts, take the processor where no other thread of the process wants it.

    It still gets about a tenth of a processor that is wanted by another. Linux alone gives a thread a niceness of its own;
    elsewhere this does nothing.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(LOW_PRIORITY_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def in_own_thread(function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
    """Call a function in a new thread that ends with it; returns or raises what it does, an interrupt once it has ended.

    PyTorch makes an OpenMP team for every thread that computes. Once all teams together have more threads than there are
    processors, each of them sleeps between two operations, and a blend takes a third longer (docs/lab-notes). So in a service
    the scheduler's thread alone keeps its team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()
