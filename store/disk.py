"""Names that last, and what a failed write means to the user."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

from .errors import StoreDirectoryError, StoreError, StoreFullError

_LITTLE_BYTES = 64 * 1024  # SQLite's shared memory grows by 32 KiB


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_disk_full(path: Path, error: Exception) -> bool:
    """Whether SQLite failed at this file for want of room; it calls that an I/O error where a file of its own is to grow."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code == sqlite3.SQLITE_FULL:
        return code is not None
    try:
        free_bytes = shutil.disk_usage(path.parent).free
    except OSError:
        return False
    return free_bytes < _LITTLE_BYTES and code & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def write_error(path: Path, error: OSError) -> StoreError:
    """The error of this project for one that the system gave while writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no room on the disk for {path}: {error.strerror}; free space, or lower nvme_budget_bytes")
    return StoreDirectoryError(
        f"{path} cannot be written: {error.strerror or error}; make the store's folder writable for this user, or name another"
    )
