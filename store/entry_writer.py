"""Entries' files written: under a temporary name, synced, then named.

Past the page cache where the file system can: what was just put lies in RAM already, and new pages of the cache cost more than
the disk takes (docs/experiments.md). A file's length is no whole number of blocks, so its last one is padded and cut off again.

The files are written here and not by the safetensors library, which would hold a second copy of the entry in memory, hide the
errno of a full disk, and align the data to 8 bytes where direct reads want a block. Any safetensors reader reads them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .direct_read import BLOCK_BYTES, make_direct
from .disk import sync_folder, write_error
from .entry import EncodedEntry
from .entry_header import byte_view

_STAGING_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be: its header, the entry, the name it is written under and its own."""

    header: bytes
    entry: EncodedEntry
    temporary: Path
    final: Path


class EntryWriter:
    """Writes entries' files through aligned memory of its own. Not thread-safe: used under the store's lock alone."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def write(self, files: Sequence[NewFile]) -> None:
        """Write the files, each synced before it has its name; names are synced at the end, a folder once.

        Raises:
            StoreFullError: the disk is full. What was written stays, under either name.
            StoreDirectoryError: the files cannot be written.

        """
        for file in files:
            try:
                self._write(file)
                os.replace(file.temporary, file.final)
            except OSError as error:
                raise write_error(file.final, error) from error
        for folder in dict.fromkeys(file.final.parent for file in files):
            try:
                sync_folder(folder)
            except OSError as error:
                raise write_error(folder, error) from error

    def _write(self, file: NewFile) -> None:
        fd = os.open(file.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without direct writes has others
                make_direct(fd)
            parts = [memoryview(file.header), *map(byte_view, file.entry.encoded)]
            self._write_blocks(fd, parts)
            if (length := sum(map(len, parts))) % BLOCK_BYTES:
                os.ftruncate(fd, length)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write_blocks(self, fd: int, parts: Iterable[memoryview]) -> None:
        """Write the parts one behind the other, in whole blocks."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, _STAGING_BYTES)
        staging, held = memoryview(self._memory), 0
        for part in parts:
            while part:
                taken = min(len(part), _STAGING_BYTES - held)
                staging[held : held + taken] = part[:taken]
                part, held = part[taken:], held + taken
                if held == _STAGING_BYTES:
                    _write(fd, staging)
                    held = 0
        _write(fd, staging[: -(-held // BLOCK_BYTES) * BLOCK_BYTES])


def _write(fd: int, rest: memoryview) -> None:
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(fd):
                raise


def _leave_direct(fd: int) -> bool:
    """Write through the page cache from now on: after a write that was cut short, or with larger blocks; False if so before."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
