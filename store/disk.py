"""Names that last, and what a failed write means to the user."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .errors import StoreDirectoryError, StoreError, StoreFullError


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(path: Path, error: OSError) -> StoreError:
    """The error of this project for one that the system gave while writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no room on the disk for {path}: {error.strerror}; free space, or lower nvme_budget_bytes")
    return StoreDirectoryError(
        f"{path} cannot be written: {error.strerror or error}; make the store's folder writable for this user, or name another"
    )
