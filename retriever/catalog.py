"""The catalog: documents, their chunks, token ids and vectors in one SQLite file, the source of truth of the index.

Shapes: N chunks, D dimensions.
"""

import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cacheblend.base import errors
from cacheblend.base.files import make_private_file
from cacheblend.base.sqlite import BUSY_TIMEOUT_S, committed, prefix_end, sqlite_errors, truncate_log
from cacheblend.store.layout import Reserve

from . import tables
from .document import CatalogedDocument, Chunk, EmbeddedDocument
from .metadata import MetadataFilter

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
FORMAT = "3"  # of the tables
_WRONG_VALUE = re.compile(r"(?<!\S)\S++ value in ")  # a finding of SQLite's that the row's checksum finds as well


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Findings of a check of every row.

    A document is damaged if one of its rows is missing or is not what was written. A repair removes it, so that questions find
    the others; it must be ingested again.
    """

    documents: int  # in the catalog
    chunks: int
    damaged: tuple[str, ...]  # ids
    strays: int  # chunks of no document, which a repair removes
    broken: bool  # SQLite finds its own structure broken; a repair makes its lookup tables again
    repaired: bool  # a repair was asked for

    @property
    def ok(self) -> bool:
        """Whether the check found no fault."""
        return not (self.damaged or self.strays or self.broken)


class Catalog:
    """Documents and chunks in SQLite; every write is one transaction and raises the generation by one.

    Not thread-safe by itself: `IndexedDocuments` holds a lock. Several processes may share a file.

    Args:
        path: the file, made when missing; None keeps the tables in memory.
        settings: settings that chunks and vectors depend on; fixed by the first document.
        budget_bytes: bytes that the tables may take; None for no bound.

    Raises:
        errors.RetrieverError: the file cannot be used, is of another format, or holds documents of other settings.
        errors.StoreFullError: the disk is full.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, str], budget_bytes: int | None = None) -> None:
        self._path, self._where = path, "memory" if path is None else str(path)
        self._settings, self._budget_bytes = dict(settings), budget_bytes
        self._reserve = None if path is None else Reserve(path.with_name("reserve"))
        self._with_reserve(self._open)

    def _open(self) -> None:
        if self._path is not None:
            make_private_file(self._path)
        with self._errors():
            self._db = self._connect()
        # The checksum finds a damaged text, and the error can name its document; a decoding error here would name none.
        self._db.text_factory = lambda raw: raw.decode(errors="surrogateescape")
        try:
            self._check_format()  # first: a file of another format is left as it is
            with self._errors():
                self._db.execute("PRAGMA foreign_keys = ON")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")  # an upload that was answered survives a power cut
                self._db.executescript(tables.SCHEMA)
                if self.setting("format") is None:
                    self._set_meta("format", FORMAT)
            self._settle(self._settings, fix=False)
        except BaseException:
            self._db.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        # isolation_level=None: _write begins and ends the transactions.
        file = self._path or ":memory:"
        connection = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA secure_delete = ON")
        return connection

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    def put(self, entries: Sequence[EmbeddedDocument], expected: Mapping[str, Sequence[str | None]] | None = None) -> int:
        """Add documents, in place of those with their ids, in one transaction; returns how many were replaced.

        Args:
            entries: the documents, each id once.
            expected: by document id, the versions of which the document must have one now; None stands for no document.

        Raises:
            errors.DocumentChangedError: a document has none of its expected versions; nothing is added then.
            errors.RetrieverError: the file cannot be written, or has other settings or vectors of another length.
            errors.StoreFullError: the disk or the budget is full; nothing is added then.
        """
        if not entries:
            with self.snapshot():
                self._check_versions(expected)
                return 0
        replaced = 0
        with self._write():
            self._check_format()
            self._check_versions(expected)
            [dimensions] = {entry.vectors_ND.shape[1] for entry in entries}  # of one embedder
            self._settle(self._settings | {"dimensions": str(dimensions)}, fix=True)
            for entry in entries:
                document = entry.document
                replaced += self._remove(document.id)
                row = (document.id, document.version, document.title, len(entry.chunks))
                self._sql(tables.INSERT_DOCUMENT, (*row, tables.row_checksum(*row)))
                if document.metadata:
                    self._sql(tables.INSERT_METADATA, tables.metadata_row(document))
                for chunk, vector_D in zip(entry.chunks, entry.vectors_ND, strict=True):
                    self._sql(tables.INSERT_CHUNK, tables.chunk_row(chunk, vector_D))
            self.check_room()
        self._refill()
        return replaced

    def rewrite(
        self,
        settings: Mapping[str, str],
        rewritten: Callable[[Sequence[Chunk], NDArray[np.float32]], tuple[Sequence[Chunk], NDArray[np.float32]]],
    ) -> None:
        """Write the chunks and vectors of every document anew for other settings, all or none; documents and metadata stay.

        Args:
            settings: those that change.
            rewritten: gives what is written in place of a document's chunks and vectors (N, D); an error ends it.

        Raises:
            errors.DamagedDocumentError: a document is not what was written.
            errors.RetrieverError, errors.StoreFullError: the file cannot be written.
        """
        with self._write():
            for id_ in self.ids():
                rows = self._sql("SELECT vector FROM chunks WHERE document_id = ? ORDER BY id", (id_,))
                chunks, vectors_ND = rewritten(self.chunks(id_), np.array([np.frombuffer(raw, "<f4") for (raw,) in rows]))
                self._sql("DELETE FROM chunks WHERE document_id = ?", (id_,))
                for chunk, vector_D in zip(chunks, vectors_ND, strict=True):
                    self._sql(tables.INSERT_CHUNK, tables.chunk_row(chunk, vector_D))
                settings = {**settings, "dimensions": str(vectors_ND.shape[1])}
            for key, value in settings.items():
                self._set_meta(key, value)

    def delete(self, *document_ids: str) -> None:
        """Remove documents with their chunks, all or none. Remains in the file go by `erase`.

        Raises:
            errors.InputError: there is no such document.
            errors.RetrieverError: the file cannot be written.
            errors.StoreFullError: the disk is full, and what was reserved for removals was used up by earlier ones.
        """

        def step() -> None:
            with self._write():
                for document_id in document_ids:
                    if not self._remove(document_id):
                        raise self._unknown(document_id)

        self._with_reserve(step)

    def erase(self) -> None:
        """Rewrite the file without what was removed, and empty its log; thread-safe, and reads go on meanwhile.

        SQLite fills with zeros what is deleted, but leaves copies of rows in the pages from which it has moved them. On a full
        disk those may stay until the next call, which is logged.

        Raises:
            errors.RetrieverError: the file is read or written all the time, or cannot be written.
        """
        if self._path is None:
            return
        with self._errors(), closing(self._connect()) as db:
            try:
                with self._errors():
                    db.execute("VACUUM")
            except errors.StoreFullError as error:
                logger.warning("parts of removed texts may stay in %s until the next removal: %s", self._where, error)
            truncate_log(db)

    def check_room(self, more_bytes: int = 0) -> None:
        """Refuse more bytes than the budget has room for, by `BudgetTooSmallError`."""
        if self._budget_bytes is None:
            return
        sizes = "pragma_page_count, pragma_freelist_count, pragma_page_size"
        [[pages, free_pages, page_bytes]] = self._sql(f"SELECT * FROM {sizes}")
        if (pages - free_pages) * page_bytes + more_bytes > self._budget_bytes:
            budget = f"index_budget_bytes={self._budget_bytes}"
            raise errors.BudgetTooSmallError(f"the index would have more than {budget}; delete documents, or raise it")

    def verify(self, *, repair: bool = False) -> IndexReport:
        """Check every row; with `repair`, repair what can be repaired, or raise `RetrieverError`. See `IndexReport`."""
        broken = self._broken_structure()
        if broken and repair:
            self._sql("REINDEX")
            if still_broken := self._broken_structure():
                raise self._unusable(still_broken)
        # By rowid, and every id: the id of a damaged row may be no text, or not the one that its chunks name.
        rows = self._sql("SELECT rowid, id FROM documents ORDER BY rowid")
        bad = [row for row in rows if self._is_damaged(*row)]
        [[chunks]] = self._sql("SELECT count(*) FROM chunks")
        [[strays]] = self._sql("SELECT count(*) FROM chunks WHERE document_id NOT IN (SELECT id FROM documents)")
        if repair and (bad or strays):
            with self._write():
                bad = [row for row in bad if self._is_damaged(*row)]  # others may have deleted or replaced it meanwhile
                for rowid, _ in bad:
                    self._sql("DELETE FROM documents WHERE rowid = ?", (rowid,))
                self._sql("DELETE FROM chunks WHERE document_id NOT IN (SELECT id FROM documents)")
        damaged = tuple(tables.printable(id_) for _, id_ in bad)
        return IndexReport(len(rows), chunks, damaged, strays, bool(broken), repair)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Reads within see one state, whatever other processes write meanwhile."""
        with self._errors():
            self._db.execute("BEGIN")
            try:
                self._settle(self._settings, fix=False)  # which another process may have rewritten
                yield
            finally:
                self._db.execute("ROLLBACK")

    @property
    def generation(self) -> int:
        """Number of writes so far, by all processes."""
        return self._number("generation", least=0) or 0

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None before the first."""
        return self._number("dimensions", least=1)

    def setting(self, key: str) -> str | None:
        """A setting that the documents were added with; None before the first."""
        rows = self._sql("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def version(self, document_id: str) -> str | None:
        """The version of a document; None if there is no such document."""
        rows = self._sql("SELECT version FROM documents WHERE id = ?", (document_id,))
        return str(rows[0][0]) if rows else None

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None if there is no such document."""
        rows = self._sql(f"{tables.SELECT_DOCUMENTS} WHERE id = ?", (document_id,))
        return tables.document_of(rows[0]) if rows else None

    def documents(
        self, limit: int | None = None, after: str | None = None, *, newest_first: bool = False
    ) -> list[CatalogedDocument]:
        """At most `limit` documents, in the order of adding or in reverse, that follow the one with the id `after`."""
        if after is not None and self.version(after) is None:
            raise self._unknown(after)
        comparison, order = ("<", "DESC") if newest_first else (">", "ASC")
        chosen = "" if after is None else f"WHERE rowid {comparison} (SELECT rowid FROM documents WHERE id = :after)"
        query = f"{tables.SELECT_DOCUMENTS} {chosen} ORDER BY rowid {order} LIMIT :limit"
        values = {"after": after, "limit": -1 if limit is None else limit}  # -1 is none for SQLite
        return [tables.document_of(row) for row in self._sql(query, values)]

    def count(self) -> int:
        """How many documents there are."""
        [[documents]] = self._sql("SELECT count(*) FROM documents")
        return int(documents)

    def ids(self, prefix: str = "") -> list[str]:
        """The ids of documents that begin with a text, in the order of adding, without a look at the others."""
        chosen, bounds = ("WHERE id >= ? AND id < ?", (prefix, prefix_end(prefix))) if prefix else ("", ())
        return [id_ for (id_,) in self._sql(f"SELECT id FROM documents {chosen} ORDER BY rowid", bounds)]

    def is_intact(self, document_id: str) -> bool:
        """Whether all rows of a document are there, and are what was written."""
        try:
            self.chunks(document_id)
            self.metadata(document_id)
        except (errors.DamagedDocumentError, errors.InputError, UnicodeEncodeError):  # the last where the id is no text
            return False
        return True

    def chunks(self, document_id: str | None = None) -> list[Chunk]:
        """The chunks of a document, or all, in the order of adding; an error if a row is missing, or not what was written."""
        if document_id is None:
            return [tables.chunk_of(row) for row in self._sql(tables.SELECT_CHUNKS + "ORDER BY c.id")]
        rows = self._sql(tables.SELECT_CHUNKS + "WHERE c.document_id = ? ORDER BY c.id", (document_id,))
        if not rows and self.version(document_id) is None:
            raise self._unknown(document_id)
        chunks = [tables.chunk_of(row) for row in rows]
        if not rows or [chunk.position for chunk in chunks] != list(range(rows[0][-2])):
            raise errors.DamagedDocumentError(document_id)
        return chunks

    def metadata(self, document_id: str) -> dict[str, Any]:
        """The metadata of a document, empty if it has none; `DamagedDocumentError` if they are not what was written."""
        for version, fields, checksum in self._sql(tables.SELECT_METADATA, (document_id,)):
            if checksum != tables.row_checksum(document_id, version, fields):
                raise errors.DamagedDocumentError(document_id)
            return dict(json.loads(fields))
        return {}

    def metadata_fields(self) -> set[str]:
        """The names of all documents' metadata."""
        return {name for (name,) in self._sql("SELECT DISTINCT key FROM metadata, json_each(fields)")}

    def chunk_ids(self, meets: MetadataFilter | None = None) -> list[int]:
        """Index ids of all chunks, or of those of documents whose metadata meet a filter."""
        chosen = "" if meets is None else f"WHERE document_id IN (SELECT document_id FROM metadata WHERE {meets.sql})"
        return [id_ for (id_,) in self._sql(f"SELECT id FROM chunks {chosen}", () if meets is None else meets.values)]

    def chunk(self, id_: int) -> Chunk:
        """The chunk of an index id; `DamagedDocumentError` if the row is not what was written."""
        rows = self._sql(tables.SELECT_CHUNKS + "WHERE c.id = ?", (id_,))
        if not rows:
            raise self._unusable("a row that a question found is gone")
        return tables.chunk_of(rows[0])

    def texts(self, after: int = 0) -> Iterator[tuple[int, str, str, str]]:
        """Index id, document's id and title, and text of every chunk, one document after the other, read as they are used.

        With `after` only chunks of higher index ids.
        """
        query = f"SELECT c.id, d.id, d.title, c.text {tables.JOINED} WHERE c.id > ? ORDER BY c.id"
        with self._errors():
            for id_, document_id, title, text in self._db.execute(query, (after,)):
                yield id_, str(document_id), str(title), str(text)

    def document_texts(self, document_id: str, version: str) -> list[str]:
        """The texts of a document's chunks, in order; none if the document has another version now."""
        query = f"SELECT c.text {tables.JOINED} WHERE d.id = ? AND d.version = ? ORDER BY c.position"
        rows = self._sql(query, (document_id, version))
        return [str(text) for (text,) in rows]

    def vectors(self, after: int = 0) -> tuple[list[int], NDArray[np.float32]]:
        """Index ids of chunks beyond one, ascending, and their vectors, float32 (N, D).

        Vectors of a wrong length or with NaN are left out, and logged. A question that finds a chunk finds its other damage.
        """
        dimensions = self.dimensions or 0
        vectors: dict[int, NDArray[np.float32]] = {}
        damaged: list[str] = []
        query = f"SELECT c.id, c.document_id, c.vector {tables.JOINED} WHERE c.id > ? ORDER BY c.id"
        with self._errors():
            for id_, owner, raw in self._db.execute(query, (after,)):
                fits = isinstance(raw, bytes) and len(raw) == 4 * dimensions
                if fits and np.isfinite(vector_D := np.frombuffer(raw, dtype="<f4")).all():
                    vectors[id_] = vector_D
                else:
                    damaged.append(str(owner))
        if damaged and not vectors and not after:
            raise self._unusable("the length of its vectors is damaged")
        for owner in damaged:
            logger.error("a chunk is not in the index: %s", errors.DamagedDocumentError(owner))
        return [*vectors], np.array([*vectors.values()], dtype=np.float32).reshape(len(vectors), dimensions)

    def _remove(self, document_id: str) -> bool:
        """Remove a document and its chunks; whether it was there."""
        return self._db.execute("DELETE FROM documents WHERE id = ?", (document_id,)).rowcount > 0

    @contextmanager
    def _write(self) -> Iterator[None]:
        """One transaction, one at a time: all or nothing, and the generation one higher."""
        with self._errors(), committed(self._db):
            self._set_meta("generation", str(self.generation + 1))
            yield

    def _with_reserve(self, step: Callable[[], _Result]) -> _Result:
        """The result of a step, which is tried again with the reserve's room if the disk is full."""
        try:
            result = step()
        except errors.StoreFullError:
            if self._reserve is None or not self._reserve.release():
                raise
            result = step()
        self._refill()
        return result

    def _refill(self) -> None:
        if self._reserve is not None:
            self._reserve.refill()

    def _is_damaged(self, rowid: int, id_: object) -> bool:
        """Whether a row of a document is there, with this id, and the document is not what was written."""
        is_intact = isinstance(id_, str) and self.is_intact(id_)
        return not is_intact and self._sql("SELECT id FROM documents WHERE rowid = ?", (rowid,)) == [(id_,)]

    def _check_versions(self, expected: Mapping[str, Sequence[str | None]] | None) -> None:
        for document_id, versions in (expected or {}).items():
            if self.version(document_id) not in versions:
                raise errors.DocumentChangedError(document_id)

    def _check_format(self) -> None:
        """Refuse a file that another version of cacheblend made: two versions never share one."""
        has_meta = self._sql("SELECT 1 FROM sqlite_master WHERE name = 'meta'")
        if has_meta and (found := self.setting("format")) not in (None, FORMAT):
            remedy = "use the version that made it, or another directory"
            raise errors.RetrieverError(f"{self._where} has format {found}, and this version reads {FORMAT}; {remedy}")

    def _settle(self, settings: Mapping[str, str], *, fix: bool) -> None:
        """Refuse settings that differ from those of the documents; before the first document `fix` stores them."""
        is_empty = not self._sql("SELECT 1 FROM documents LIMIT 1")
        for key, value in settings.items():
            if is_empty and fix:
                self._set_meta(key, value)
            elif not is_empty and (stored := self.setting(key)) != value:
                # A tokenizer is known by a hash, which says nothing to users.
                of = "another model" if key == "tokenizer" else f"{key} {stored!r}, and this run has {value!r}"
                why = f"{self._where} was built with {of}; use that, `cacheblend reindex`, or another folder"
                raise errors.OtherIndexError(why)

    def _broken_structure(self) -> str:
        """The first fault of SQLite's own structure; empty if it has none."""
        found = (str(message) for (message,) in self._sql("PRAGMA integrity_check(100)"))
        return next((message for message in found if message != "ok" and not _WRONG_VALUE.match(message)), "")

    def _number(self, key: str, *, least: int) -> int | None:
        value = self.setting(key)
        if value is not None and (not value.isdecimal() or int(value) < least):
            raise self._unusable(f"its {key} is damaged ({value!r})")
        return None if value is None else int(value)

    def _set_meta(self, key: str, value: str) -> None:
        self._sql("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    def _sql(self, sql: str, arguments: Sequence[object] | Mapping[str, object] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db.execute(sql, arguments).fetchall()

    def _errors(self) -> AbstractContextManager[None]:
        return sqlite_errors(self._path, self._unusable)

    def _unusable(self, why: object) -> errors.RetrieverError:
        remedy = "try `cacheblend store verify --repair`, or another directory"
        return errors.RetrieverError(f"the catalog in {self._where} cannot be used: {why}; {remedy}")

    def _unknown(self, document_id: str) -> errors.InputError:
        return errors.InputError(f"there is no document {document_id!r}; documents() lists them")
