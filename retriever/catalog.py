"""The catalog: documents, their chunks, token ids and vectors in one SQLite file, the source of truth of the index.

Every read compares the row's checksum, see `catalog_rows`.

Shapes: N chunks, D dimensions.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cacheblend.base.errors import DamagedDocumentError, InputError, RetrieverError, StoreFullError
from cacheblend.base.files import is_disk_full, make_private_file
from cacheblend.store.layout import Reserve

from .catalog_rows import (
    SCHEMA,
    SELECT_CHUNKS,
    SELECT_DOCUMENTS,
    TO_FORMAT_2,
    chunk_of,
    document_of,
    row_checksum,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .catalog_rows import (
        CatalogedDocument,
    )
    from .document import Chunk, Document

logger = logging.getLogger(__name__)

FORMAT = "2"
_BEFORE_CHECKSUMS = "1"  # a format that is brought to this one at opening
BUSY_TIMEOUT_S = 30.0
_WRONG_VALUE = re.compile(r"\S+ value in ")  # found by the row's checksum
_STATE = ("generation", "dimensions", "format")  # what of `meta` is no setting


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What a check of every row found.

    Args:
        documents: documents in the catalog.
        chunks: chunks in it.
        damaged: ids of documents of which a row is missing or is not what was written; repaired by removing them, so that
            questions find the others: they must be ingested again.
        strays: chunks of no document; repaired by removing them.
        broken: whether SQLite finds the file's own structure broken; repaired by making its lookup tables again.
        repaired: whether it was all mended.
    """

    documents: int
    chunks: int
    damaged: tuple[str, ...]
    strays: int
    broken: bool
    repaired: bool

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not (self.damaged or self.strays or self.broken)


@dataclass(frozen=True, slots=True)
class Change:
    """What a write did: index ids that came and went, and the catalog's generation after it."""

    added_ids: list[int]
    removed_ids: list[int]
    generation: int


class Catalog:
    """Documents and chunks in SQLite; every write is one transaction and raises the generation by one.

    Not thread-safe by itself: `Retriever` holds a lock. Several processes may share a file.

    Args:
        path: the file, made when missing; None keeps it in memory.
        settings: what the chunks and vectors depend on; fixed from the first document on.

    Raises:
        RetrieverError: the file cannot be used, is of another format, or holds documents of other settings.
        StoreFullError: the disk is full, and documents are to be written.

    """

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        self._path = path
        self._where = "memory" if path is None else str(path)
        self._settings = dict(settings)
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
        return self._number("generation") or 0

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None before the first."""
        dimensions = self._number("dimensions")
        if dimensions is not None and dimensions < 1:
            raise self._unusable("the length of its vectors is damaged")
        return dimensions

    @property
    def settings(self) -> dict[str, str]:
        """What the documents were added with; empty before the first."""
        return {key: value for key, value in self._rows("SELECT key, value FROM meta") if key not in _STATE}

    def put(self, document: Document | CatalogedDocument, chunks: Sequence[Chunk], vectors_ND: NDArray[np.float32]) -> Change:
        """Add a document, in place of the one with its id, in one transaction.

        Raises:
            RetrieverError: the file cannot be written, or has other settings or vectors of another length.
            StoreFullError: the disk is full.

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
                "INSERT INTO documents (id, version, title, created_s, chunks, checksum) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(document.id, document.version, document.title, time.time(), len(chunks)),
                    row_checksum(document.id, document.version, document.title, len(chunks)),
                ),
            )
            added = [self._insert(chunk, vector_D) for chunk, vector_D in zip(chunks, vectors_ND, strict=True)]
            change = Change(added, removed, self.generation)
        self._refill()
        return change

    def remove(self, document_id: str) -> Change:
        """Remove a document and its chunks in one transaction; on a full disk, too, as long as it has a reserve.

        Raises:
            InputError: there is no such document.
            RetrieverError: the file cannot be written.
            StoreFullError: the disk is full, and the reserve was needed before.

        """
        try:
            change = self._take_out(document_id)
        except StoreFullError:
            if self._reserve is None or not self._reserve.release():
                raise
            change = self._take_out(document_id)
        self._refill()
        return change

    def _refill(self) -> None:
        if self._reserve is not None:
            self._reserve.refill()

    def _take_out(self, document_id: str) -> Change:
        with self._write():
            if self.version(document_id) is None:
                raise self._unknown(document_id)
            return Change([], self._remove(document_id), self.generation)

    def version(self, document_id: str) -> str | None:
        """The version of a document; None where there is no such document."""
        rows = self._rows("SELECT version FROM documents WHERE id = ?", (document_id,))
        return str(rows[0][0]) if rows else None

    def documents(self, limit: int | None = None, after: str | None = None) -> list[CatalogedDocument]:
        """Documents in the order of adding.

        Args:
            limit: at most so many; None for all.
            after: those added after this one; None for the first ones.

        Raises:
            InputError: there is no document `after`.

        """
        last = 0
        if after is not None:
            rows = self._rows("SELECT rowid FROM documents WHERE id = ?", (after,))
            if not rows:
                raise self._unknown(after)
            last = rows[0][0]
        arguments = (last, -1 if limit is None else limit)
        return [document_of(row) for row in self._rows(f"{SELECT_DOCUMENTS} WHERE rowid > ? ORDER BY rowid LIMIT ?", arguments)]

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None where there is no such document."""
        rows = self._rows(f"{SELECT_DOCUMENTS} WHERE id = ?", (document_id,))
        return document_of(rows[0]) if rows else None

    def ids(self) -> set[str]:
        """Every document's id."""
        return {id_ for (id_,) in self._rows("SELECT id FROM documents")}

    def is_whole(self, document_id: str) -> bool:
        """Whether all rows of a document are there, and are what was written."""
        try:
            self.chunks(document_id)
        except (DamagedDocumentError, InputError):
            return False
        return True

    def verify(self, *, repair: bool) -> IndexReport:
        """Check every row; with `repair`, mend what can be mended. See `IndexReport`.

        Raises:
            RetrieverError: the file's own structure is broken beyond that.
            StoreFullError: the disk has no room for the repair.

        """
        broken = self._broken_structure()
        if broken and repair:
            with self._errors():
                self._db.execute("REINDEX")
            if still_broken := self._broken_structure():
                raise self._unusable(still_broken)
        # By rowid, and every id: those of damaged rows may be no text, or not the one that their chunks name.
        rows = self._rows("SELECT rowid, id FROM documents ORDER BY rowid")
        bad = [(rowid, id_) for rowid, id_ in rows if not isinstance(id_, str) or not self.is_whole(id_)]
        [[chunks]] = self._rows("SELECT count(*) FROM chunks")
        [[strays]] = self._rows("SELECT count(*) FROM chunks WHERE document_id NOT IN (SELECT id FROM documents)")
        if repair and (bad or strays):
            with self._write():
                for rowid, _ in bad:
                    self._db.execute("DELETE FROM documents WHERE rowid = ?", (rowid,))
                self._db.execute("DELETE FROM chunks WHERE document_id NOT IN (SELECT id FROM documents)")
        damaged = tuple(str(id_).encode(errors="replace").decode() for _, id_ in bad)
        return IndexReport(
            documents=len(rows),
            chunks=chunks,
            damaged=damaged,
            strays=strays,
            broken=bool(broken),
            repaired=repair,
        )

    def _broken_structure(self) -> str:
        """The first thing that SQLite finds wrong with the file; empty for nothing. Values are the rows' checksums' affair."""
        found = (str(message) for (message,) in self._rows("PRAGMA integrity_check(100)"))
        return next((message for message in found if message != "ok" and not _WRONG_VALUE.match(message)), "")

    def chunks(self, document_id: str | None = None) -> list[Chunk]:
        """The chunks of a document, or all, in the order of adding.

        Raises:
            InputError: there is no such document.
            DamagedDocumentError: a row is missing, or is not what was written.

        """
        if document_id is None:
            return [chunk_of(row) for row in self._rows(SELECT_CHUNKS + "ORDER BY c.id")]
        rows = self._rows(SELECT_CHUNKS + "WHERE c.document_id = ? ORDER BY c.id", (document_id,))
        if not rows:
            if self.version(document_id) is not None:
                raise DamagedDocumentError(document_id)
            raise self._unknown(document_id)
        chunks = [chunk_of(row) for row in rows]
        if [chunk.position for chunk in chunks] != list(range(rows[0][-2])):
            raise DamagedDocumentError(document_id)
        return chunks

    def chunk(self, id_: int) -> Chunk | None:
        """The chunk of an index id; None where there is none, which is so of an index that does not fit this catalog.

        Raises:
            DamagedDocumentError: the row is not what was written.

        """
        rows = self._rows(SELECT_CHUNKS + "WHERE c.id = ?", (id_,))
        return chunk_of(rows[0]) if rows else None

    def has_chunks(self, ids: Sequence[int]) -> bool:
        """Whether there is a chunk of each of these index ids; not so of an index that does not fit this catalog."""
        [[found]] = self._rows("SELECT count(*) FROM chunks WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(ids),))
        return bool(found == len(ids))

    def texts(self) -> Iterator[tuple[int, str, str, str]]:
        """Index id, document's id and title, and text of every chunk, a document after the other; damage shows later."""
        rows = self._rows(
            "SELECT c.id, d.id, d.title, c.text FROM chunks c JOIN documents d ON d.id = c.document_id ORDER BY c.id"
        )
        return ((id_, str(document_id), str(title), str(text)) for id_, document_id, title, text in rows)

    def document_texts(self, document_id: str, version: str) -> list[str]:
        """The texts of a document's chunks, in order; none where it has another version by now."""
        query = "SELECT c.text FROM chunks c JOIN documents d ON d.id = c.document_id "
        rows = self._rows(query + "WHERE d.id = ? AND d.version = ? ORDER BY c.position", (document_id, version))
        return [str(text) for (text,) in rows]

    def vectors(self, document_id: str | None = None) -> tuple[list[int], NDArray[np.float32]]:
        """Index ids of a document's chunks, or of all, ascending, and their vectors, float32 (N, D).

        Vectors that cannot be of this catalog are left out, and logged; one that is damaged otherwise is found out with its
        chunk, when a question comes upon it.
        """
        query = "SELECT c.id, c.document_id, c.vector FROM chunks c JOIN documents d ON d.id = c.document_id "
        arguments: tuple[str, ...] = ()
        if document_id is not None:
            query, arguments = f"{query} WHERE c.document_id = ?", (document_id,)
        dimensions = self.dimensions or 0
        ids: list[int] = []
        vectors: list[NDArray[np.float32]] = []
        damaged: list[str] = []
        for id_, owner, raw in self._rows(f"{query} ORDER BY c.id", arguments):
            if isinstance(raw, bytes) and len(raw) == 4 * dimensions:
                vector_D = np.frombuffer(raw, dtype="<f4")
                if np.isfinite(vector_D).all():
                    ids.append(id_)
                    vectors.append(vector_D)
                    continue
            damaged.append(str(owner))
        if damaged and not ids:
            raise self._unusable("the length of its vectors is damaged")
        for owner in damaged:
            logger.error("a chunk is not in the index: %s", DamagedDocumentError(owner))
        return ids, np.array(vectors, dtype=np.float32).reshape(len(ids), dimensions)

    def _insert(self, chunk: Chunk, vector_D: NDArray[np.float32]) -> int:
        token_ids, vector = np.asarray(chunk.token_ids, dtype="<i4").tobytes(), vector_D.astype("<f4").tobytes()
        checksum = row_checksum(chunk.document_id, chunk.version, chunk.position, chunk.text, token_ids, vector)
        cursor = self._db.execute(
            "INSERT INTO chunks (document_id, position, text, token_ids, vector, checksum) VALUES (?, ?, ?, ?, ?, ?)",
            (chunk.document_id, chunk.position, chunk.text, token_ids, vector, checksum),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _remove(self, document_id: str) -> list[int]:
        removed = [id_ for (id_,) in self._db.execute("SELECT id FROM chunks WHERE document_id = ?", (document_id,))]
        self._db.execute("DELETE FROM documents WHERE id = ?", (document_id,))
        return removed

    def _check_format(self) -> None:
        """Refuse a file that another version of cacheblend made: two versions never share one."""
        if self._has_meta() and (found := self._meta("format")) not in (None, FORMAT, _BEFORE_CHECKSUMS):
            raise RetrieverError(
                f"{self._where} has format {found}, this version of cacheblend reads {FORMAT}; "
                "use the version that made it, or another directory and ingest the documents anew"
            )

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
                self._set_meta("format", FORMAT)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

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

    def _number(self, key: str) -> int | None:
        value = self._meta(key)
        if value is None:
            return None
        try:
            return int(value)
        except ValueError:
            raise self._unusable(f"its {key} is damaged ({value!r})") from None

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    def _rows(self, sql: str, arguments: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, arguments).fetchall()

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

    def _unknown(self, document_id: str) -> InputError:
        return InputError(f"there is no document {document_id!r} in {self._where}; documents() lists them")
