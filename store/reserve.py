"""Room on the disk that is given up where a removal finds none, so that a full disk can be emptied."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

RESERVE_BYTES = 512 * 1024  # SQLite's log of a removal or a pin has room in it: a page of 4 KiB a changed page of the catalogue


class Reserve:
    """A file that holds nothing but its place. To be used by one process at a time.

    Args:
        path: the file; made by `refill`.

    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def refill(self) -> None:
        """Take the room again; where the disk has none for it, a later call does."""
        try:
            if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, 0)
                rest = memoryview(os.urandom(RESERVE_BYTES))  # a hole, or zeros where the disk compresses, would take no room
                while rest:
                    rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # half of it would only take what others need

    def release(self) -> bool:
        """Give the room up; False where there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        logger.warning("the disk of %s is full: its reserve is given up for a removal", self._path.parent)
        return True
