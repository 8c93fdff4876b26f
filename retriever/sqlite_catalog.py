"""The catalog in one SQLite file, of one machine."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import RetrieverError, StoreFullError
from cacheblend.base.files import is_disk_full, make_private_file
from cacheblend.store.layout import Reserve

from .catalog import Catalog, Change
from .catalog_rows import INSERT_CHUNK, SCHEMA, TO_FORMAT_2, row_checksum

if TYPE_CHECKING:
    from .catalog import Entry

_BEFORE_CHECKSUMS = "1"  # a format that is brought to this one at opening
BUSY_TIMEOUT_S = 30.0
_WRONG_VALUE = re.compile(r"\S+ value in ")  # found by the row's checksum


class SqliteCatalog(Catalog):
    """Documents and chunks in SQLite.

    Args:
        path: the file, made when missing; None keeps it in memory.
        settings: what the chunks and vectors depend on; fixed from the first document on.

    Raises:
        RetrieverError: the file cannot be used, is of another format, or holds documents of other settings.
        StoreFullError: the disk is full, and documents are to be written.

    """

    format = "2"

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        super().__init__("memory" if path is None else str(path), settings)
        self._path = path
        self._reserve = None if path is None else Reserve(path.with_name("reserve"))
        try:
            self._open()
        except StoreFullError:
            if self._reserve is None or not self._reserve.release():
                raise
            self._open()
        self._refill()

    def _open(self) -> None:
        path = self._path
        if path is not None:
            make_private_file(path)
        with self._errors():
            # isolation_level=None: transactions are begun and ended by _write alone.
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        # A damaged text is found by its checksum, and then by name; an error here would name no document.
        self._db.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        try:
            self._check_format()  # first: a file of another format is left as it is
            with self._errors():
                self._db.execute("PRAGMA foreign_keys = ON")
                self._db.execute("PRAGMA journal_mode = WAL")
                # A power cut may lose the last documents, never half of one; FULL would sync the disk once a document.
                self._db.execute("PRAGMA synchronous = NORMAL")
                if self._has_meta() and self._meta("format") == _BEFORE_CHECKSUMS:
                    self._add_checksums()
                self._db.executescript(SCHEMA)
                if self._meta("format") is None:
                    self._set_meta("format", self.format)
            if not self._is_empty():
                self._compare(self._settings)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    def put(self, entries: Sequence[Entry], expected: Mapping[str, Sequence[str | None]] | None = None) -> Change:
        """See `Catalog.put`."""
        change = super().put(entries, expected)
        self._refill()
        return change

    def remove(self, document_id: str) -> Change:
        """See `Catalog.remove`; on a full disk, too, as long as it has a reserve.

        Raises:
            StoreFullError: the disk is full, and the reserve was needed before.

        """
        try:
            change = super().remove(document_id)
        except StoreFullError:
            if self._reserve is None or not self._reserve.release():
                raise
            change = super().remove(document_id)
        self._refill()
        return change

    def _refill(self) -> None:
        if self._reserve is not None:
            self._reserve.refill()

    def _broken_structure(self) -> str:
        # Of wrong values tells the rows' checksums.
        found = (str(message) for (message,) in self._rows("PRAGMA integrity_check(100)"))
        return next((message for message in found if message != "ok" and not _WRONG_VALUE.match(message)), "")

    def _mend_structure(self) -> None:
        self._run("REINDEX")

    def _insert(self, rows: Sequence[tuple[str, int, str, bytes, bytes, bytes]]) -> list[int]:
        added = []
        for row in rows:
            cursor = self._db.execute(INSERT_CHUNK, row)
            assert cursor.lastrowid is not None
            added.append(cursor.lastrowid)
        return added

    def _check_format(self) -> None:
        if self._has_meta() and (found := self._meta("format")) not in (None, self.format, _BEFORE_CHECKSUMS):
            raise self._other_format(found)

    def _has_meta(self) -> bool:
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'"))

    def _add_checksums(self) -> None:
        """Bring a file of the format before this one to it: what its rows hold now is taken to be what was written."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self._meta("format") == _BEFORE_CHECKSUMS:  # no other process was sooner
                for statement in TO_FORMAT_2:
                    self._db.execute(statement)
                self._db.create_function("checksum", -1, row_checksum, deterministic=True)
                self._db.execute("UPDATE documents SET chunks = (SELECT count(*) FROM chunks WHERE document_id = documents.id)")
                self._db.execute("UPDATE documents SET checksum = checksum(id, version, title, chunks)")
                self._db.execute(
                    "UPDATE chunks SET checksum = checksum(document_id, (SELECT version FROM documents WHERE id = document_id)"
                    ", position, text, token_ids, vector)"
                )
                self._set_meta("format", self.format)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Catalog.snapshot`."""
        with self._errors():
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    @contextmanager
    def _write(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._set_meta("generation", str(self.generation + 1))
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, sql: str, arguments: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, arguments).fetchall()

    def _run(self, sql: str, arguments: Sequence[object] = ()) -> None:
        with self._errors():
            self._db.execute(sql, arguments)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where a damaged name stands in SQLite's own message
            if self._path is not None and is_disk_full(self._path, error):
                raise StoreFullError(f"no room on the disk for {self._where}: {error}; free space") from error
            raise self._unusable(error) from error

    def _unusable(self, why: object) -> RetrieverError:
        return RetrieverError(
            f"the catalog in {self._where} cannot be used: {why}; check that the directory is a retriever's and that it is "
            "writable, try `cacheblend store verify --repair`, or ingest into another directory"
        )
