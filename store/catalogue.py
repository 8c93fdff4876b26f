"""Which entries are on NVMe, how large they are and when they were used last, in one SQLite file."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StoreDirectoryError, StoreError, StoreFullError
from .key import ChunkKey

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 30.0
_MAX_TOUCHED = 1024
_PAGE = 64

# Totals are kept by triggers: summing 100,000 rows at every put would take longer than the put.
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE entries (
    digest TEXT PRIMARY KEY,
    model TEXT NOT NULL,
    codec TEXT NOT NULL,
    namespace TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    layers INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    created_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entries_by_use ON entries (used_ns);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes;
END;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """An entry as the catalogue lists it; `bytes` of its file, times in nanoseconds of Unix time."""

    key: ChunkKey
    tokens: int
    layers: int
    bytes: int
    created_ns: int
    used_ns: int


class Catalogue:
    """The table of entries; thread-safe. Several processes may share the file.

    Uses are noted in memory and written with the next change, so that a hit costs no transaction; a crash forgets the last
    1,024 at most. Times of use only ever grow, even where the clock goes back.

    Raises:
        StoreDirectoryError: the file cannot be used, or is of another schema.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Two connections: a lookup does not wait for a change that is being synced to the disk.
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._writer, self._reader = self._connect(), self._connect()
        self._touch_lock = threading.Lock()
        self._touched: dict[str, int] = {}
        self._last_ns = 0
        try:
            with self._errors():
                self._prepare()
            ((self._last_ns,),) = self._rows("SELECT coalesce(max(used_ns), 0) FROM entries")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing. Uses that were not written yet are lost: see `save_uses`."""
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    def __contains__(self, digest: str) -> bool:
        return bool(self._rows("SELECT 1 FROM entries WHERE digest = ?", digest))

    def totals(self) -> tuple[int, int]:
        """Number of entries, and bytes of their files."""
        ((entries, total_bytes),) = self._rows("SELECT entries, bytes FROM totals")
        return entries, total_bytes

    def touch(self, digest: str) -> None:
        """Note that an entry is used now."""
        used_ns = self.now_ns()
        with self._touch_lock:
            self._touched[digest] = used_ns
            full = len(self._touched) % _MAX_TOUCHED == 0
        if full:
            try:
                self.save_uses()
            except StoreError as error:
                logger.warning("times of use are kept in memory for now: %s", error)

    def now_ns(self) -> int:
        """The time, later than any that this catalogue gave or holds."""
        with self._touch_lock:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            return self._last_ns

    def change(self, *, add: CatalogueEntry | None = None, remove: Iterable[str] = ()) -> None:
        """Add an entry and remove others in one transaction, synced to the disk on return.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the file cannot be written.

        """
        with self._write_lock, self._errors():
            with self._touch_lock:
                touched, self._touched = self._touched, {}
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                uses = ((used_ns, digest) for digest, used_ns in touched.items())
                self._writer.executemany("UPDATE entries SET used_ns = max(used_ns, ?) WHERE digest = ?", uses)
                self._writer.executemany("DELETE FROM entries WHERE digest = ?", ((digest,) for digest in remove))
                if add is not None:
                    key = add.key
                    self._writer.execute("DELETE FROM entries WHERE digest = ?", (key.digest,))
                    self._writer.execute(
                        "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        (
                            *(key.digest, key.model, key.codec, key.namespace),
                            *(add.tokens, add.layers, add.bytes, add.created_ns, add.used_ns),
                        ),
                    )
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                with self._touch_lock:
                    self._touched = touched | self._touched
                raise

    def save_uses(self) -> None:
        """Write the uses that were noted; raises as `change` does."""
        if self._touched:
            self.change()

    def by_use(self) -> Iterator[tuple[str, int]]:
        """Digest and bytes of every entry, the least recently used first."""
        self.save_uses()
        last = (-1, "")
        while True:
            page = self._rows(
                "SELECT used_ns, digest, bytes FROM entries WHERE (used_ns, digest) > (?, ?) ORDER BY used_ns, digest LIMIT ?",
                *last,
                _PAGE,
            )
            for used_ns, digest, entry_bytes in page:
                last = (used_ns, digest)
                yield digest, entry_bytes
            if len(page) < _PAGE:
                return

    def entries(self) -> list[CatalogueEntry]:
        """Every entry, the least recently used first."""
        self.save_uses()
        return [
            CatalogueEntry(ChunkKey(*row[:4]), *row[4:]) for row in self._rows("SELECT * FROM entries ORDER BY used_ns, digest")
        ]

    def _rows(self, query: str, *values: str | int) -> list[Any]:
        with self._read_lock, self._errors():
            return self._reader.execute(query, values).fetchall()

    def _connect(self) -> sqlite3.Connection:
        with self._errors():
            # isolation_level=None: `change` alone begins and ends transactions.
            return sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)

    def _prepare(self) -> None:
        self._writer.execute("PRAGMA journal_mode = WAL")
        # What `put` returned is not lost in a power cut; NORMAL would sync at checkpoints alone.
        self._writer.execute("PRAGMA synchronous = FULL")
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._writer.executescript(_SCHEMA)
        elif version != SCHEMA_VERSION:
            raise StoreDirectoryError(
                f"{self._path} has schema {version}, this version of cacheblend reads {SCHEMA_VERSION}; "
                "use the version that made it, or a new folder (chunks are computed again)"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise StoreFullError(f"no room on the disk for {self._path}: {error}; free space") from error
            raise StoreDirectoryError(
                f"{self._path} cannot be used: {error}; check that the folder is writable, or move catalogue.sqlite* away "
                "and run `cacheblend store verify --repair`, which makes it again from the entries' files"
            ) from error
