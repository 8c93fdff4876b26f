"""Direct reads and writes, past the page cache: full blocks, in memory that begins on a block."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from cacheblend.base.errors import ConfigError
from cacheblend.base.memory import Bytes, host_bytes

BLOCK_BYTES = 4096
_mine = threading.local()


def make_direct(fd: int) -> None:
    """Have reads and writes of a descriptor pass the page cache by.

    Raises:
        OSError: the file system or the system has none such.

    """
    if hasattr(os, "O_DIRECT"):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    elif (no_cache := getattr(fcntl, "F_NOCACHE", None)) is not None:
        fcntl.fcntl(fd, no_cache, 1)
    else:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def leave_direct(fd: int) -> bool:
    """Go through the page cache from now on: after a write that was cut short, or with larger blocks; False if so before.

    With F_NOCACHE there are no blocks to keep to, and nothing to leave.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)


def check_direct_reads(folder: Path) -> None:
    """Refuse a folder whose file system has no direct reads.

    Raises:
        ConfigError: the file system has none.

    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            make_direct(file.fileno())
        except OSError as error:
            allowed = f"the file system of {folder} has no direct reads ({error.strerror}); leave it out"
            raise ConfigError("direct_reads", True, allowed) from error


def read_blocks(fill: Callable[[memoryview, int, int], None], offset: int, count: int, *, reuse: bool) -> Bytes:
    """`count` bytes from `offset` on, inside aligned memory.

    Args:
        fill: reads at least so many bytes (its third argument) from an offset (its second) into a buffer (its first), which
            may have room for more, up to the end of a block.
        offset: the first byte.
        count: bytes.
        reuse: the memory is this thread's and is overwritten by its next read; otherwise it is the caller's own.
    """
    start = offset // BLOCK_BYTES * BLOCK_BYTES
    needed = offset + count - start
    blocks = aligned_blocks(needed, reuse=reuse)
    fill(blocks.data, start, needed)
    return blocks[offset - start : needed]


def aligned_blocks(count: int, *, reuse: bool = False) -> Bytes:
    """Memory that begins on a block, of full blocks for `count` bytes, padded with zeros.

    With `reuse` it is this thread's, and is overwritten by its next use.
    """
    size = -(-count // BLOCK_BYTES) * BLOCK_BYTES
    held: Bytes | None = getattr(_mine, "blocks", None)
    if reuse and held is not None and len(held) >= size:
        blocks = held[:size]
    else:
        raw = host_bytes(torch.empty(size + BLOCK_BYTES, dtype=torch.uint8, device="cpu"))
        blocks = raw[-raw.ctypes.data % BLOCK_BYTES :][:size]
        if reuse:
            _mine.blocks = blocks
    blocks[count:] = 0
    return blocks
