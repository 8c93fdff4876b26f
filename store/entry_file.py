"""One entry as one safetensors file: a tensor a layer, in layer order, each one contiguous read."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from cacheblend.base.errors import DamagedEntryError, StoreError
from cacheblend.base.files import FILE_MODE, Closing, sync_folder, write_error
from cacheblend.base.memory import Bytes

from .chunk import host_bytes
from .entry import BLOCK_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES, EncodedEntry, EntryInfo, aligned_blocks, parse_header

_MAX_PARTS = 1024  # of one vectored read (IOV_MAX)


class EntryFile(Closing):
    """An entry's file, open for reading by several threads; a context manager. Use `open`.

    A file that other processes unlink stays readable until it is closed.
    """

    def __init__(self, fd: int, path: Path, info: EntryInfo, checksums: list[str], data_start: int) -> None:
        self.info, self._fd, self._path, self._checksums = info, fd, path, checksums
        self._offsets = list(itertools.accumulate(info.sizes, initial=data_start))
        self._lock = threading.Lock()
        self._readers, self._closed = 0, False

    @classmethod
    def open(cls, path: Path, digest: str) -> EntryFile:
        """Open the file of the entry `digest`, and check its header and length.

        Raises:
            DamagedEntryError: the file is missing, or is not what was written.
            OSError: it cannot be opened, for a reason that says nothing of its content.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DamagedEntryError(f"{path} is missing") from error
        try:
            found_bytes = os.fstat(fd).st_size
            header_bytes = int.from_bytes(_read(fd, LENGTH_BYTES, 0, path), "little")
            if not 0 < header_bytes <= min(MAX_HEADER_BYTES, found_bytes - LENGTH_BYTES):
                raise DamagedEntryError(f"{path} has {found_bytes} bytes and says that its header has {header_bytes}")
            try:
                info, checksums = parse_header(_read(fd, header_bytes, LENGTH_BYTES, path), digest)
            except ValueError as error:
                raise DamagedEntryError(f"{path} has a damaged header: {error}") from error
            file = cls(fd, path, info, checksums, LENGTH_BYTES + header_bytes)
            if file.file_bytes != found_bytes:
                raise DamagedEntryError(f"{path} has {found_bytes} bytes instead of {file.file_bytes}")
        except BaseException:
            os.close(fd)
            raise
        return file

    @property
    def written_ns(self) -> int:
        """When it was written; of the open file, since another process may have unlinked its name."""
        return os.fstat(self._fd).st_mtime_ns

    @property
    def file_bytes(self) -> int:
        return self._offsets[-1]

    def read_layer(self, layer: int) -> torch.Tensor:
        """Read one layer's encoded tensor, in one read straight into its memory, and check it; not to be written to.

        Raises:
            DamagedEntryError: the bytes are not the ones that were written.
            StoreError: the entry is closed.
        """
        dtype, shape = self.info.shapes[layer]
        encoded = torch.empty(shape, dtype=dtype, device="cpu")
        self._read_into(layer, [host_bytes(encoded).reshape(-1).data])
        return encoded

    def read_layer_into(self, layer: int, to_2HTB: Bytes) -> None:
        """Read one layer of a raw entry, in one read, to where it is needed, and check it; raises as `read_layer` does.

        The memory is filled before the check, so it is worth nothing where that fails.
        """
        self._read_into(layer, [to_TB.data.cast("B") for to_HTB in to_2HTB for to_TB in to_HTB])

    def _read_into(self, layer: int, parts: Sequence[memoryview]) -> None:
        with self._reading():
            _fill(self._fd, parts, self._offsets[layer], self._path)
        found = xxhash.xxh3_64()
        for part in parts:
            found.update(part)
        if found.hexdigest() != self._checksums[layer]:
            raise DamagedEntryError(f"layer {layer} of {self._path} does not match its checksum")

    def load(self) -> EncodedEntry:
        """Read the complete entry in one read, and check it; raises as `read_layer` does."""
        entry = EncodedEntry(self.info, self._checksums)
        with self._reading():
            _fill(self._fd, [piece.data for piece in entry.pieces], self._offsets[0], self._path, entry.nbytes)
        try:
            entry.check()
        except ValueError as error:
            raise DamagedEntryError(f"{self._path}: {error}") from error
        return entry

    def close(self) -> None:
        """Close the file as soon as no thread is reading from it; a second call does nothing."""
        with self._lock:
            if not self._closed and not self._readers:
                os.close(self._fd)
            self._closed = True

    @contextmanager
    def _reading(self) -> Iterator[None]:
        # A descriptor that is closed under a reader may be another file's by the time it reads.
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._path} was read after it was closed")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._closed and not self._readers:
                    os.close(self._fd)


def _read(fd: int, count: int, offset: int, path: Path) -> bytearray:
    buffer = bytearray(count)
    _fill(fd, [memoryview(buffer)], offset, path)
    return buffer


def _fill(fd: int, parts: Sequence[memoryview], offset: int, path: Path, needed: int | None = None) -> None:
    """Fill buffers from the file, one after the other, with `needed` bytes at least: all of them where it is not given.

    To a reader a short file and a failing disk are the same: damage.
    """
    parts_left = [part for part in parts if part]
    missing = sum(map(len, parts_left)) if needed is None else needed
    while missing > 0:
        try:
            count = os.preadv(fd, parts_left[:_MAX_PARTS], offset)
        except OSError as error:
            raise DamagedEntryError(f"{path} cannot be read at byte {offset}: {error}") from error
        if not count:
            raise DamagedEntryError(f"{path} ends before byte {offset + missing}")
        missing, offset = missing - count, offset + count
        while parts_left and count >= len(parts_left[0]):
            count -= len(parts_left.pop(0))
        if count:
            parts_left[0] = parts_left[0][count:]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file to be: its header, the entry, the name it is written under and its own."""

    header: bytes
    entry: EncodedEntry
    temporary: Path
    final: Path

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.entry.nbytes


def write_files(files: Sequence[NewFile]) -> None:
    """Write files, all of them synced before one has its name; names are synced at the end, a folder once.

    The first sync includes much of the others' work: together they need a fifth of the processor time.

    Raises:
        StoreFullError: the disk is full. What was written stays, under either name.
        StoreDirectoryError: the files cannot be written.
    """
    try:
        with ExitStack() as opened:
            fds: list[int] = []
            for file in files:
                fds.append(os.open(file.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE))
                opened.callback(os.close, fds[-1])
                _write_file(fds[-1], file)
            for fd in fds:
                os.fsync(fd)
        for file in files:
            os.replace(file.temporary, file.final)
        for folder in dict.fromkeys(file.final.parent for file in files):
            sync_folder(folder)
    except OSError as error:
        raise write_error(files[0].final, error) from error


def _write_file(fd: int, file: NewFile) -> None:
    """Write header and layers past the page cache, in full blocks, and truncate the last block's padding."""
    with suppress(OSError):  # a file system without direct writes has others
        make_direct(fd)
    header = aligned_blocks(len(file.header))
    header[: len(file.header)] = np.frombuffer(file.header, np.uint8)
    for part in (header, *file.entry.pieces):
        _write(fd, part.data)
    if file.nbytes % BLOCK_BYTES:
        os.ftruncate(fd, file.nbytes)


def _write(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not leave_direct(fd):
                raise


def make_direct(fd: int) -> None:
    """Have reads and writes of a descriptor pass the page cache by; an `OSError` where that does not exist."""
    if not hasattr(os, "O_DIRECT"):  # macOS, for one
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def leave_direct(fd: int) -> bool:
    """Go through the page cache from now on: after a write that was cut short, or with larger blocks; False if so before."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    direct: int = getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
