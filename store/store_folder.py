"""What lies where in a store's folder, and how a folder is known to be a store.

store.json           marker: what this folder is, and its format version
catalogue.sqlite     which entries there are
lock                 held by the process that changes files or catalogue
journal              the entries that it is changing; empty between changes
entries/ab/abcd...   one file an entry, in folders by the first two digits of its key
reserve              room that is given up where the disk is too full for a removal
writing/             files that are being written; left over there after a crash
damaged/             files whose bytes were not the ones written, set aside; the last few, outside the budget
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cacheblend.base.errors import StoreDirectoryError
from cacheblend.base.files import make_folder, private_opener, sync_folder, write_error

logger = logging.getLogger(__name__)

STORE_FORMAT = 1
_KIND = "cacheblend-store"
_MARKER = "store.json"
_NEW_MARKER = f"{_MARKER}.new"
_MARKER_BYTES = 4096
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
_KEPT_DAMAGED = 8
_IGNORED = ("lost+found", _NEW_MARKER)  # the root of a fresh file system is an empty folder too


def holds_store(root: Path) -> bool:
    """Whether a folder was made by `StoreFolder`; looks, and makes nothing."""
    return (root / _MARKER).is_file()


class StoreFolder:
    """The folder of a store, made when missing.

    Args:
        root: the folder.

    Raises:
        StoreDirectoryError: it is a file, holds something else, cannot be written, or is of another format.

    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.catalogue, self.lock, self.journal, self.reserve = (
            root / name for name in ("catalogue.sqlite", "lock", "journal", "reserve")
        )
        self._marker, self._entries, self.writing, self.damaged = (
            root / name for name in (_MARKER, "entries", "writing", "damaged")
        )
        if root.exists() and not root.is_dir():
            raise StoreDirectoryError(f"{root} is a file, not a store; name a folder")
        try:
            make_folder(root)
            if not self._marker.exists() or self._is_damaged_marker():
                self._make()
            self._check()
            for folder in (self._entries, self.writing, self.damaged):
                make_folder(folder)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise write_error(root, error) from error

    def entry_path(self, digest: str) -> Path:
        """Where the entry's file is."""
        return self._entries / digest[:2] / digest

    def new_entry_paths(self, digests: Iterable[str]) -> list[Path]:
        """Where entries' files are to be; makes their folders."""
        paths = [self.entry_path(digest) for digest in digests]
        missing = [folder for folder in {path.parent for path in paths} if not folder.is_dir()]
        try:
            for folder in missing:
                make_folder(folder)
            if missing:
                sync_folder(self._entries)
        except OSError as error:
            raise write_error(self._entries, error) from error
        return paths

    def entry_files(self) -> Iterator[Path]:
        """Every file of the entries' folders, in order."""
        for folder in sorted(self._entries.iterdir()):
            if folder.is_dir():
                yield from (path for path in sorted(folder.iterdir()) if path.is_file())

    def set_aside(self, path: Path) -> None:
        """Move a damaged file away, for whoever wants to see what happened to it; drops the oldest of such files."""
        with suppress(FileNotFoundError):
            os.replace(path, self.damaged / path.name)
            os.utime(self.damaged / path.name)
        for old in sorted(self.damaged.iterdir(), key=lambda file: file.stat().st_mtime_ns)[:-_KEPT_DAMAGED]:
            old.unlink(missing_ok=True)

    def _make(self) -> None:
        strangers = sorted(path.name for path in self.root.iterdir() if not path.name.startswith(_IGNORED))
        if self._has_the_rest():
            logger.warning("%s is missing or damaged, and is made again: the rest of the store is there", self._marker)
        elif strangers and not self._marker.exists():  # another process may just have made it
            raise StoreDirectoryError(
                f"{self.root} is not a store: it holds {strangers[0]} and no {self._marker.name}; name an empty or a new folder"
            )
        # Renamed into place: a crash leaves no half-written marker, which would make the folder a stranger.
        new = self.root / f"{_NEW_MARKER}.{os.getpid()}"
        with open(new, "w", encoding="utf-8", opener=private_opener) as file:
            file.write(json.dumps({"kind": _KIND, "format": STORE_FORMAT}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._marker)
        sync_folder(self.root)

    def _has_the_rest(self) -> bool:
        """Whether a folder is a store but for its marker; the catalogue's own version tells whether it can be read."""
        return self.catalogue.is_file() and self.lock.is_file() and self._entries.is_dir()

    def _is_damaged_marker(self) -> bool:
        """Whether the marker says nothing that any version wrote, in a folder that has all else."""
        if not self._has_the_rest():
            return False
        try:
            kind, version = self._read_marker()
        except _UNREADABLE:
            return True
        return kind != _KIND or not isinstance(version, int)

    def _read_marker(self) -> tuple[object, object]:
        marker = json.loads(self._marker.read_bytes()[:_MARKER_BYTES])
        return marker["kind"], marker["format"]

    def _check(self) -> None:
        try:
            kind, version = self._read_marker()
        except _UNREADABLE as error:
            raise StoreDirectoryError(f"{self._marker} is not a store's marker; name another folder") from error
        if kind != _KIND:
            raise StoreDirectoryError(f"{self.root} is not a store but {kind!r}; name another folder")
        if version != STORE_FORMAT:
            raise StoreDirectoryError(
                f"{self.root} has format {version}, this version of cacheblend reads {STORE_FORMAT}; "
                "use the version that made it, or a new folder (chunks are computed again); where no other version ever used "
                f"it, the number is damaged: remove {_MARKER}, which is made again"
            )
