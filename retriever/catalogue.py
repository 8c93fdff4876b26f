"""The truth about what was added: documents, their chunks, token ids and vectors, in one SQLite file.

Shapes: N chunks, D dimensions.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheblend.store.disk import make_private_file
from cacheblend.store.errors import InputError, RetrieverError

from .chunk import Chunk
from .document import Document

FORMAT = "1"
BUSY_TIMEOUT_S = 30.0
_STATE = ("generation", "dimensions", "format")  # what of `meta` is no setting

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (id TEXT PRIMARY KEY, version TEXT NOT NULL, title TEXT NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the index's id; never used twice
    document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,               -- int32, little-endian
    vector BLOB NOT NULL,                  -- float32, little-endian
    UNIQUE (document_id, position)
);
"""
_SELECT_CHUNKS = """
SELECT c.document_id, d.version, c.position, d.title, c.text, c.token_ids
FROM chunks c JOIN documents d ON d.id = c.document_id
"""


@dataclass(frozen=True, slots=True)
class CataloguedDocument:
    """A document as the catalogue lists it; `created_s` is Unix time."""

    id: str
    version: str
    title: str
    chunks: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """What a write did: index ids that came and went, and the catalogue's generation after it."""

    added_ids: list[int]
    removed_ids: list[int]
    generation: int


class Catalogue:
    """Documents and chunks in SQLite; every write is one transaction and raises the generation by one.

    Not thread-safe by itself: `Retriever` holds a lock. Several processes may share a file.

    Args:
        path: the file, made when missing; None keeps it in memory.
        settings: what the chunks and vectors depend on; fixed from the first document on.

    Raises:
        RetrieverError: the file cannot be used, is of another format, or holds documents of other settings.

    """

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        self._where = "memory" if path is None else str(path)
        self._settings = dict(settings)
        if path is not None:
            make_private_file(path)
        with self._errors():
            # isolation_level=None: transactions are begun and ended by _write alone.
            self._db = sqlite3.connect(
                ":memory:" if path is None else path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            self._check_format()  # first: a file of another format is left as it is
            with self._errors():
                self._db.execute("PRAGMA foreign_keys = ON")
                self._db.execute("PRAGMA journal_mode = WAL")
                # A power cut may lose the last documents, never half of one; FULL would sync the disk once a document.
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.executescript(_SCHEMA)
                if self._meta("format") is None:
                    self._set_meta("format", FORMAT)
            if not self._is_empty():
                self._compare(self._settings)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    @property
    def generation(self) -> int:
        """How many writes there have been, by any process."""
        return int(self._meta("generation") or 0)

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None before the first."""
        value = self._meta("dimensions")
        return None if value is None else int(value)

    @property
    def settings(self) -> dict[str, str]:
        """What the documents were added with; empty before the first."""
        return {key: value for key, value in self._rows("SELECT key, value FROM meta") if key not in _STATE}

    def put(self, document: Document | CataloguedDocument, chunks: Sequence[Chunk], vectors_ND: NDArray[np.float32]) -> Change:
        """Add a document, in place of the one with its id, in one transaction.

        Raises:
            RetrieverError: the file cannot be written, or has other settings or vectors of another length.

        """
        settings = {**self._settings, "dimensions": str(vectors_ND.shape[1])}
        with self._write():
            self._check_format()
            if self._is_empty():
                for key, value in settings.items():
                    self._set_meta(key, value)
            else:
                self._compare(settings)
            removed = self._remove(document.id)
            self._db.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?)", (document.id, document.version, document.title, time.time())
            )
            added = [self._insert(chunk, vector_D) for chunk, vector_D in zip(chunks, vectors_ND, strict=True)]
            return Change(added, removed, self.generation)

    def remove(self, document_id: str) -> Change:
        """Remove a document and its chunks in one transaction.

        Raises:
            InputError: there is no such document.
            RetrieverError: the file cannot be written.

        """
        with self._write():
            if self.version(document_id) is None:
                raise self._unknown(document_id)
            return Change([], self._remove(document_id), self.generation)

    def version(self, document_id: str) -> str | None:
        """The version of a document; None where there is no such document."""
        rows = self._rows("SELECT version FROM documents WHERE id = ?", (document_id,))
        return str(rows[0][0]) if rows else None

    def documents(self) -> list[CataloguedDocument]:
        """Every document, in the order of adding."""
        rows = self._rows(
            "SELECT d.id, d.version, d.title, count(c.id), d.created_s FROM documents d JOIN chunks c ON c.document_id = d.id "
            "GROUP BY d.id ORDER BY min(c.id)"
        )
        return [CataloguedDocument(*row) for row in rows]

    def chunks(self, document_id: str | None = None) -> list[Chunk]:
        """The chunks of a document, or all, in the order of adding.

        Raises:
            InputError: there is no such document.

        """
        if document_id is None:
            return [_chunk(row) for row in self._rows(_SELECT_CHUNKS + "ORDER BY c.id")]
        rows = self._rows(_SELECT_CHUNKS + "WHERE c.document_id = ? ORDER BY c.id", (document_id,))
        if not rows:
            raise self._unknown(document_id)
        return [_chunk(row) for row in rows]

    def chunk(self, id_: int) -> Chunk:
        """The chunk of an index id that this catalogue gave."""
        [row] = self._rows(_SELECT_CHUNKS + "WHERE c.id = ?", (id_,))
        return _chunk(row)

    def vectors(self, document_id: str | None = None) -> tuple[list[int], NDArray[np.float32]]:
        """Index ids of a document's chunks, or of all, ascending, and their vectors, float32 (N, D)."""
        if document_id is None:
            rows = self._rows("SELECT id, vector FROM chunks ORDER BY id")
        else:
            rows = self._rows("SELECT id, vector FROM chunks WHERE document_id = ? ORDER BY id", (document_id,))
        vectors_ND = np.frombuffer(b"".join(vector for _, vector in rows), dtype="<f4").reshape(len(rows), -1 if rows else 0)
        return [id_ for id_, _ in rows], vectors_ND.astype(np.float32, copy=False)

    def _insert(self, chunk: Chunk, vector_D: NDArray[np.float32]) -> int:
        token_ids = np.asarray(chunk.token_ids, dtype="<i4").tobytes()
        cursor = self._db.execute(
            "INSERT INTO chunks (document_id, position, text, token_ids, vector) VALUES (?, ?, ?, ?, ?)",
            (chunk.document_id, chunk.position, chunk.text, token_ids, vector_D.astype("<f4").tobytes()),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _remove(self, document_id: str) -> list[int]:
        removed = [id_ for (id_,) in self._db.execute("SELECT id FROM chunks WHERE document_id = ?", (document_id,))]
        self._db.execute("DELETE FROM documents WHERE id = ?", (document_id,))
        return removed

    def _check_format(self) -> None:
        """Refuse a file that another version of cacheblend made: two versions never share one."""
        has_meta = self._rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        if has_meta and (found := self._meta("format")) not in (None, FORMAT):
            raise RetrieverError(
                f"{self._where} has format {found}, this version of cacheblend reads {FORMAT}; "
                "use the version that made it, or another directory and ingest the documents anew"
            )

    def _compare(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if (stored := self._meta(key)) != value:
                raise RetrieverError(
                    f"{self._where} was built with {key} {stored!r}, and this run has {value!r}; "
                    "use the same again, or another directory and ingest the documents anew"
                )

    def _is_empty(self) -> bool:
        return not self._rows("SELECT 1 FROM documents LIMIT 1")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Reads within see one state, whatever other processes write meanwhile."""
        with self._errors():
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    @contextmanager
    def _write(self) -> Iterator[None]:
        """One transaction: all or nothing, and the generation one higher."""
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

    def _meta(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    def _rows(self, sql: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, arguments).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RetrieverError(
                f"the catalogue in {self._where} cannot be used: {error}; check that the directory is a retriever's, "
                "that it is writable and its disk not full, or ingest into another directory"
            ) from error

    def _unknown(self, document_id: str) -> InputError:
        return InputError(f"there is no document {document_id!r} in {self._where}; documents() lists them")


def _chunk(row: tuple[Any, ...]) -> Chunk:
    document_id, version, position, title, text, token_ids = row
    ids = tuple(np.frombuffer(token_ids, dtype="<i4").tolist())
    return Chunk(document_id, version, position, title, text, ids)
