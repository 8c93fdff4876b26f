"""Which entries a change is about to touch, noted where a crash leaves it for the next one to read."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from cacheblend.base.files import FILE_MODE, write_error

logger = logging.getLogger(__name__)

_DIGITS = 64  # of a digest


class Journal:
    """A file with the digests of the change under way, empty between changes; used under the store's lock alone.

    It is written before anything else is, and not synced: a killed process leaves it whole. After a power cut it may be gone,
    and files without a row stay until `verify` finds them.

    Raises:
        StoreDirectoryError: the file cannot be opened for writing.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise write_error(path, error) from error

    def begin(self, digests: Sequence[str]) -> None:
        """Note the digests. Where the disk has no room for them, the change goes on without: removals must work then."""
        rest, offset = "".join(f"{digest}\n" for digest in digests).encode(), 0
        try:
            while rest:
                count = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): should the process die now, run `cacheblend store verify`", self._path, error
            )

    def end(self) -> None:
        """Forget the digests."""
        os.ftruncate(self._fd, 0)

    def unfinished(self) -> list[str]:
        """The digests of a change that was not ended; nothing had changed yet where the last one is cut off."""
        if not (size := os.fstat(self._fd).st_size):
            return []
        lines = os.pread(self._fd, size, 0).decode(errors="replace").splitlines()
        return [line for line in lines if len(line) == _DIGITS and line.isalnum()]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
