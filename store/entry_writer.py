"""Entries' files written: under a temporary name, synced, then named.

Past the page cache where the file system can: what was just put lies in RAM already, and new pages of the cache cost more than
the disk takes (docs/lab-notes). A file's length is no whole number of blocks, so its last one is padded and cut off again.

The files are written here and not by the safetensors library, which would hold a second copy of the entry in memory, hide the
errno of a full disk, and align the data to 8 bytes where direct reads want a block. Any safetensors reader reads them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cacheblend.base.files import FILE_MODE, sync_folder, write_error

from .direct_read import BLOCK_BYTES, aligned_blocks, leave_direct, make_direct
from .entry import EncodedEntry


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be: its header, the entry, the name it is written under and its own."""

    header: bytes
    entry: EncodedEntry
    temporary: Path
    final: Path


def write_files(files: Sequence[NewFile]) -> None:
    """Write files, all of them synced before one has its name; names are synced at the end, a folder once.

    The first sync does most of the others' work: together they take a fifth of the processor time (docs/lab-notes).

    Raises:
        StoreFullError: the disk is full. What was written stays, under either name.
        StoreDirectoryError: the files cannot be written.

    """
    with ExitStack() as opened:
        written: list[tuple[NewFile, int]] = []
        for file in files:
            with _errors(file.final):
                fd = os.open(file.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
                opened.callback(os.close, fd)
                _write_file(fd, file)
                written.append((file, fd))
        for file, fd in written:
            with _errors(file.final):
                os.fsync(fd)
    for file in files:
        with _errors(file.final):
            os.replace(file.temporary, file.final)
    for folder in dict.fromkeys(file.final.parent for file in files):
        with _errors(folder):
            sync_folder(folder)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def _write_file(fd: int, file: NewFile) -> None:
    """Write header and layers, in whole blocks, and cut off what the last block has too much."""
    with suppress(OSError):  # a file system without direct writes has others
        make_direct(fd)
    header = aligned_blocks(len(file.header), reuse=True)
    header[: len(file.header)] = np.frombuffer(file.header, np.uint8)
    _write(fd, header.data)
    for piece in file.entry.pieces:
        _write(fd, piece.data)
    if (length := len(file.header) + file.entry.nbytes) % BLOCK_BYTES:
        os.ftruncate(fd, length)


def _write(fd: int, rest: memoryview) -> None:
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not leave_direct(fd):
                raise
