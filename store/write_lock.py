"""One writer at a time, among the threads of this process and among processes that share a store."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from types import TracebackType

from cacheblend.base.files import FILE_MODE, write_error


class WriteLock:
    """A re-entrant lock on a file; a context manager. The system frees it when its process dies.

    Files and catalogue change only under it, so that neither is ever seen between the two, and what a journal or the folder
    of files being written holds when it is taken was left by a crash.

    Raises:
        StoreDirectoryError: the file cannot be opened for writing.

    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise write_error(path, error) from error
        self._threads = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            if not self.depth:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            self.depth += 1
        except BaseException:
            self._threads.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        try:
            if not self.depth:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
