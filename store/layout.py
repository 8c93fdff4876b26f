"""On-disk layout of a store's folder: its marker, journal, lock and reserve.

store.json           marker of the folder; the catalog and each entry have a version
catalogue.sqlite     the entries
lock                 held by the process that changes files or catalog
journal              the entries that it is changing; empty between changes
entries/ab/abcd...   one file an entry, in folders by the first two digits of its key
reserve              room that is freed when the disk is too full for a removal
writing/             files that are being written; a crash leaves some there
damaged/             files whose bytes were not the ones written; the last few, outside the budget
"""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cacheblend.base.errors import DamagedEntryError, StoreDirectoryError
from cacheblend.base.files import FILE_MODE, make_folder, replacing, sync_folder, write_error

logger = logging.getLogger(__name__)

_MARK = b'{"kind": "cacheblend-store"}\n'
_MARKER = "store.json"
_MAX_DAMAGED_FILES = 8
_SAID_AFTER_S = 2.0
_IGNORED = ("lost+found", f"{_MARKER}.")  # the root of a fresh file system is an empty folder too


class StoreFolder:
    """The folder of a store, made when missing.

    Raises:
        StoreDirectoryError: it is a file, holds something else, cannot be written, or is of another format.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        files = map(root.joinpath, ("catalogue.sqlite", "lock", "journal", "reserve"))
        self.catalog, self.lock, self.journal, self.reserve = files
        self._marker, self._entries, self.writing, self.damaged = map(root.joinpath, (_MARKER, "entries", "writing", "damaged"))
        if root.exists() and not root.is_dir():
            raise StoreDirectoryError(f"{root} is a file, not a store; name a folder")
        try:
            make_folder(root)
            self._check_marker()
            for folder in (self._entries, self.writing, self.damaged):
                make_folder(folder)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise write_error(root, error) from error

    def entry_path(self, digest: str) -> Path:
        return self._entries / digest[:2] / digest

    def make_entry_folders(self, paths: Iterable[Path]) -> None:
        """Make the folders of entries' files."""
        missing = [folder for folder in {path.parent for path in paths} if not folder.is_dir()]
        try:
            for folder in missing:
                make_folder(folder)
            if missing:
                sync_folder(self._entries)
        except OSError as error:
            raise write_error(self._entries, error) from error

    def entry_files(self) -> Iterator[Path]:
        """Every file of the entries' folders, in order."""
        for folder in sorted(self._entries.iterdir()):
            if folder.is_dir():
                yield from (path for path in sorted(folder.iterdir()) if path.is_file())

    def set_aside(self, path: Path, damage: DamagedEntryError) -> None:
        """Move a damaged entry's file to `damaged`, for inspection; drops the oldest such files."""
        logger.warning("entry %s is a miss and set aside in %s: %s", path.name, self.damaged, damage)
        with suppress(FileNotFoundError):
            os.replace(path, self.damaged / path.name)
            os.utime(self.damaged / path.name)
        for old in sorted(self.damaged.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-_MAX_DAMAGED_FILES]:
            old.unlink(missing_ok=True)

    def clear_damaged(self) -> None:
        """Remove the files that were set aside."""
        for path in self.damaged.iterdir():
            path.unlink(missing_ok=True)

    def _check_marker(self) -> None:
        """Refuse a folder that is none of a store; make the marker of a new store, and that of a store which lost it."""
        if self._is_marked():
            return
        if self.catalog.is_file() and self.lock.is_file() and self._entries.is_dir():
            logger.warning("%s is missing or damaged, and is made again: the rest of the store is there", self._marker)
        else:
            strangers = sorted(path.name for path in self.root.iterdir() if not path.name.startswith(_IGNORED))
            if strangers and not self._is_marked():  # another process may just have made it
                why = f"it holds {strangers[0]}, and {_MARKER} does not mark it as one"
                raise StoreDirectoryError(f"{self.root} is not a store: {why}; name an empty or a new folder")
        # Renamed into place: a crash leaves no half-written marker, which would make the folder a stranger.
        with replacing(self._marker) as file:
            file.write(_MARK)
        sync_folder(self.root)

    def _is_marked(self) -> bool:
        with suppress(FileNotFoundError):
            return self._marker.read_bytes()[: len(_MARK) + 1] == _MARK
        return False


_DIGITS = 64  # of a digest


class Journal:
    """A file with the digests of the change under way, empty between changes; used only under the store's lock.

    It is written before anything else, and not synced: a killed process leaves it complete. After a power cut it may be
    missing, and files without a row stay until `verify` finds them.

    Raises:
        StoreDirectoryError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, _open(path)

    def begin(self, digests: Sequence[str]) -> None:
        """Note the digests. On a full disk the change continues without them, since removals must work then."""
        data, offset = "".join(f"{digest}\n" for digest in digests).encode(), 0
        try:
            while data:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            logger.warning("%s cannot be written (%s): if this process dies, run `cacheblend store verify`", self._path, error)

    def end(self) -> None:
        os.ftruncate(self._fd, 0)

    def unfinished(self) -> list[str]:
        """The digests of an unfinished change; if the last one is cut off, nothing had changed yet."""
        if not (size := os.fstat(self._fd).st_size):
            return []
        lines = os.pread(self._fd, size, 0).decode(errors="replace").splitlines()
        return [line for line in lines if len(line) == _DIGITS and line.isalnum()]

    def close(self) -> None:
        os.close(self._fd)


class WriteLock:
    """A re-entrant lock on a file; a context manager. The system frees it when its process dies.

    A wait for another process is logged after `said_after_s`. Files and catalog change only under the lock, so that nobody sees
    one change without the other. A journal or files in `writing` that exist when it is acquired were left by a crash.

    Raises:
        StoreDirectoryError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, said_after_s: float = _SAID_AFTER_S) -> None:
        self._fd, self._path, self._said_after_s = _open(path), path, said_after_s
        self._threads = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            if not self.depth:
                self._lock_file()
            self.depth += 1
        except BaseException:
            self._threads.release()
            raise

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "waiting for another process, which holds %s while it works"
            notice = threading.Timer(self._said_after_s, logger.warning, (why, self._path))
            notice.start()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            finally:
                notice.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        try:
            if not self.depth:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        os.close(self._fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise write_error(path, error) from error


RESERVE_BYTES = 512 * 1024  # room for SQLite's log of a removal: 4 KiB for each changed page of the catalog


class Reserve:
    """A file that only occupies disk space; made by `refill`. Used by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def refill(self) -> None:
        """Occupy the room again; if the disk has none, a later call will."""
        try:
            if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, 0)
                data = memoryview(os.urandom(RESERVE_BYTES))  # a hole, or zeros on a compressing disk, would occupy no room
                while data:
                    data = data[os.write(fd, data) :]
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # half a reserve would only occupy room

    def release(self) -> bool:
        """Free the room; False if there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        logger.warning("the disk of %s is full: its reserve is given up for a removal", self._path.parent)
        return True
