"""Files: modes, fsync helpers, write-then-rename, and the error of a failed write.

The files hold the documents' text, or KV from which it can be inferred, so only the owner may read them, whatever the umask
is. The mode of an existing folder is not changed.
"""

import errno
import hashlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from .errors import StoreDirectoryError, StoreError, StoreFullError

FILE_MODE, FOLDER_MODE = 0o600, 0o700


class Closing(ABC):
    """A context manager that closes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; nothing if that has gone."""


def make_folder(folder: Path) -> None:
    """Make a folder and missing parents with a mode for their owner only; existing folders are not changed.

    Raises:
        OSError: the folder cannot be made, or is a file.
    """
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def make_private_file(path: Path) -> None:
    """Make an empty file for a library that would make it with the umask's mode; errors are left for the library to report.

    An existing file is not opened: closing it would free the locks that SQLite holds on it in this process.
    """
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a private file that replaces `path` at the end; a crash leaves the old file or the new one.

    Raises:
        OSError: the file cannot be written; the old file stays.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(path: Path, error: OSError) -> StoreError:
    """Translate a system error of a write into one of this project's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no room on the disk for {path}: {error.strerror}; free space, or use another disk")
    return StoreDirectoryError(f"{path} cannot be written: {error.strerror or error}; make it writable, or name another folder")


def user_data_folder() -> Path:
    """`cacheblend` in `XDG_DATA_HOME`, or in `~/.local/share`; it may not exist yet."""
    return Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share"), "cacheblend")


def user_cache_folder() -> Path:
    """`cacheblend` in `XDG_CACHE_HOME`, or in `~/.cache`; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cacheblend")
