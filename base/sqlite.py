"""SQLite: a file that threads and processes share, its transactions, and its errors."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import StoreDirectoryError, StoreFullError
from .files import make_private_file

BUSY_TIMEOUT_S = 30.0
_LITTLE_BYTES = 64 * 1024  # SQLite's shared memory grows by 32 KiB
CACHE_KIB = 1024  # of each connection; the system's page cache holds the rest


class Database:
    """Two connections to a file, which is made if missing: a lookup does not wait for a change that is being synced.

    Raises:
        StoreDirectoryError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_private_file(path)
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        with self._errors():
            self._writer = self._connect()
            self._reader = self._connect()
            try:
                self._writer.execute("PRAGMA journal_mode = WAL")
                # A put that returned survives a power cut; NORMAL would sync at checkpoints only.
                self._writer.execute("PRAGMA synchronous = FULL")
                self._file_id = _file_id(path)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    def rows(self, query: str, *values: str | int) -> list[Any]:
        """The rows of a query."""
        with self._read_lock, self._errors():
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all statements executed inside, or none; synced to the disk at the end.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the file cannot be written, or another file has taken its place.
        """
        with self._write_lock, self._errors():
            if _file_id(self._path) != self._file_id:
                raise StoreDirectoryError(f"{self._path} was removed or replaced while the store was open; open it again")
            with committed(self._writer):
                yield self._writer

    def settle(self) -> None:
        """Make the state that is visible now the state of the next opening; call it before acting on the visible state.

        A process that dies in its commit may leave it complete in the write-ahead log, but not announced: other processes do
        not see it, while a later opening reads the log and does. A commit made here replaces it in the log.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the file cannot be written.
        """
        with self.transaction() as transaction:
            ((version,),) = transaction.execute("PRAGMA user_version").fetchall()
            transaction.execute(f"PRAGMA user_version = {version}")  # writes its page even if the number is unchanged

    def truncate_log(self) -> None:
        """Empty the log, which holds older pages too; raises StoreFullError or StoreDirectoryError."""
        with self._write_lock, self._errors():
            truncate_log(self._writer)

    def check(self) -> None:
        """Check the file's own structure.

        Raises:
            StoreDirectoryError: the structure is broken.
        """
        ((found,), *_) = self.rows("PRAGMA quick_check(1)")
        if found != "ok":
            raise self.unusable(found)

    def _connect(self) -> sqlite3.Connection:
        # isolation_level=None: only `transaction` begins and ends transactions.
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def _errors(self) -> AbstractContextManager[None]:
        return sqlite_errors(self._path, self.unusable)

    def unusable(self, why: object) -> StoreDirectoryError:
        """The error for a broken file, with its remedy."""
        remedy = f"make it writable, or, with the store closed, move {self._path.name}* away: it is made anew from the files"
        return StoreDirectoryError(f"{self._path} cannot be used: {why}; {remedy}")


@contextmanager
def committed(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements executed inside, or none."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:  # commits, or rolls back
        yield


@contextmanager
def sqlite_errors(path: Path | None, unusable: Callable[[object], Exception]) -> Iterator[None]:
    """Raise errors of SQLite as `StoreFullError` if the disk of the file is full, else as `unusable` makes them."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where a damaged name stands in SQLite's own message
        if path is not None and _is_disk_full(path, error):
            raise StoreFullError(f"no room on the disk for {path}: {error}; free space, or mend a disk that has it") from error
        raise unusable(error) from error


def truncate_log(connection: sqlite3.Connection) -> None:
    """Empty the write-ahead log, which holds older pages too; waits for readers, and raises `sqlite3.Error` after a while."""
    ((is_busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if is_busy:
        raise sqlite3.OperationalError("it is read all the time, so its log still has what was removed; remove something again")


def _is_disk_full(path: Path, error: Exception) -> bool:
    """Whether SQLite failed because disk or quota is full: for its own growing files, and a quota, it reports an I/O error."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and code != sqlite3.SQLITE_IOERR_WRITE:
        with suppress(OSError):
            return shutil.disk_usage(path.parent).free < _LITTLE_BYTES
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def prefix_end(prefix: str) -> str:
    """The smallest text above all texts that begin with `prefix`, so that these are a range in a table's byte order."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
