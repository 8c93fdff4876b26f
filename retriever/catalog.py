"""The catalog: documents, their chunks, token ids and vectors, the source of truth of the index.

What is here is the same in every database: the statements, and how rows become documents and chunks. `SqliteCatalog` keeps
them in a file of one machine, `PostgresCatalog` in a server that many share. Vectors and words are searched in the process
itself, in structures that follow the catalog by its generation. Every read compares the row's checksum, see `catalog_rows`.

Shapes: N chunks, D dimensions.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cacheblend.base.errors import DamagedDocumentError, DocumentChangedError, InputError, RetrieverError
from cacheblend.base.sqlite import prefix_end

from .catalog_rows import SELECT_CHUNKS, SELECT_DOCUMENTS, chunk_of, document_of, row_checksum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .catalog_rows import CatalogedDocument
    from .document import Chunk, Document

    # A document, its chunks, and their vectors, float32 (N, D).
    Entry = tuple[Document | CatalogedDocument, Sequence[Chunk], NDArray[np.float32]]

logger = logging.getLogger(__name__)
_STATE = ("generation", "dimensions", "format", "identity")  # what of `meta` is no setting
_ALL = 2**62  # as a limit, and above every rowid
_GIVEN = 1000  # values that one statement is given at most


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """Findings of a check of every row.

    Args:
        documents: documents in the catalog.
        chunks: chunks in it.
        damaged: ids of documents of which a row is missing or is not what was written; repaired by removing them, so that
            questions find the others: they must be ingested again.
        strays: chunks of no document; repaired by removing them.
        broken: whether the database finds its own structure broken; repaired by making its lookup tables again.
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
    """Effect of writes.

    Args:
        added_ids: index ids that came.
        removed_ids: those that went.
        generation: the catalog's, after them.
        removed_documents: ids of documents that went, or were replaced.
    """

    added_ids: list[int]
    removed_ids: list[int]
    generation: int
    removed_documents: frozenset[str] = frozenset()


class Catalog(ABC):
    """Documents and chunks in a database; every write is one transaction and raises the generation by one.

    Not thread-safe by itself: `Retriever` holds a lock. Several processes may share a database.

    Args:
        where: the database, in words.
        settings: what the chunks and vectors depend on; fixed from the first document on.
    """

    format: ClassVar[str]  # of its tables
    by_bytes: ClassVar[str] = ""  # after a column: compared byte by byte, which is not every database's way

    def __init__(self, where: str, settings: Mapping[str, str]) -> None:
        self._where, self._settings = where, dict(settings)

    # What a database must do.

    @abstractmethod
    def _rows(self, sql: str, arguments: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement, whose arguments stand for its question marks."""

    @abstractmethod
    def _run(self, sql: str, arguments: Sequence[object] = ()) -> None:
        """Run a statement that gives no rows."""

    @abstractmethod
    def _insert(self, rows: Sequence[tuple[str, int, str, bytes, bytes, bytes]]) -> list[int]:
        """Add chunks' rows (`INSERT_CHUNK`); their index ids."""

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Reads within see one state, whatever other processes write meanwhile."""

    @abstractmethod
    def _write(self) -> AbstractContextManager[None]:
        """One transaction, one at a time: all or nothing, and the generation one higher."""

    @abstractmethod
    def _broken_structure(self) -> str:
        """The first thing that is wrong with the database's own structure; empty for nothing."""

    @abstractmethod
    def _mend_structure(self) -> None:
        """Make the lookup tables again."""

    @abstractmethod
    def _unusable(self, why: object) -> RetrieverError:
        """The error of a database that cannot be used."""

    def changes(self, since: int) -> Change | None:
        """What came and went after a generation, asked in a snapshot; None where all has to be read anew."""
        return None

    @property
    def identity(self) -> str:
        """What tells a database that may change behind a folder's back from others; empty where it lies in the folder."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Close the database; a second call does nothing."""

    # What is the same in all of them.

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

    def put(self, entries: Sequence[Entry], expected: Mapping[str, Sequence[str | None]] | None = None) -> Change:
        """Add documents, in place of those with their ids, in one transaction.

        Args:
            entries: the documents, each id once.
            expected: by document id, versions of which the document must have one now, None for no document.

        Raises:
            DocumentChangedError: a document has none of its expected versions; nothing is added then.
            RetrieverError: the database cannot be written, or has other settings or vectors of another length.
            StoreFullError: the disk is full.

        """
        if not entries:
            with self.snapshot():
                self._check_versions(expected or {})
                return Change([], [], self.generation)
        added: list[int] = []
        removed: dict[str, list[int]] = {}
        with self._write():
            self._check_format()
            self._check_versions(expected or {})
            [dimensions] = {vectors_ND.shape[1] for *_, vectors_ND in entries}  # of one embedder
            settings = {**self._settings, "dimensions": str(dimensions)}
            if self._is_empty():
                for key, value in settings.items():
                    self._set_meta(key, value)
            else:
                self._compare(settings)
            for document, chunks, vectors_ND in entries:
                if of_document := self._remove(document.id):
                    removed[document.id] = of_document
                checksum = row_checksum(document.id, document.version, document.title, len(chunks))
                self._run(
                    "INSERT INTO documents (id, version, title, created_s, chunks, checksum) VALUES (?, ?, ?, ?, ?, ?)",
                    (document.id, document.version, document.title, time.time(), len(chunks), checksum),
                )
                added += self._insert([_row(chunk, vector_D) for chunk, vector_D in zip(chunks, vectors_ND, strict=True)])
            return Change(added, [id_ for ids in removed.values() for id_ in ids], self.generation, frozenset(removed))

    def remove(self, document_id: str) -> Change:
        """Remove a document and its chunks in one transaction.

        Raises:
            InputError: there is no such document.
            RetrieverError: the database cannot be written.

        """
        with self._write():
            if self.version(document_id) is None:
                raise self._unknown(document_id)
            return Change([], self._remove(document_id), self.generation, frozenset({document_id}))

    def version(self, document_id: str) -> str | None:
        """The version of a document; None where there is no such document."""
        rows = self._rows("SELECT version FROM documents WHERE id = ?", (document_id,))
        return str(rows[0][0]) if rows else None

    def documents(
        self, limit: int | None = None, after: str | None = None, *, newest_first: bool = False
    ) -> list[CatalogedDocument]:
        """Documents in the order of adding, or in the reverse.

        Args:
            limit: at most so many; None for all.
            after: those that follow this one in that order; None for the first ones.
            newest_first: in the reverse.

        Raises:
            InputError: there is no document `after`.

        """
        first, comparison, order = (_ALL, "<", "DESC") if newest_first else (0, ">", "ASC")
        if after is not None:
            rows = self._rows("SELECT rowid FROM documents WHERE id = ?", (after,))
            if not rows:
                raise self._unknown(after)
            first = rows[0][0]
        query = f"{SELECT_DOCUMENTS} WHERE rowid {comparison} ? ORDER BY rowid {order} LIMIT ?"
        return [document_of(row) for row in self._rows(query, (first, _ALL if limit is None else limit))]

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None where there is no such document."""
        rows = self._rows(f"{SELECT_DOCUMENTS} WHERE id = ?", (document_id,))
        return document_of(rows[0]) if rows else None

    def versions(self) -> dict[str, str]:
        """Every document's id and version."""
        return dict(self._rows("SELECT id, version FROM documents"))

    def ids(self, prefix: str = "") -> list[str]:
        """The ids of documents that begin with a text, in the order of adding, at the cost of those."""
        if not prefix:
            return [id_ for (id_,) in self._rows("SELECT id FROM documents ORDER BY rowid")]
        column = f"id{self.by_bytes}"
        query = f"SELECT id FROM documents WHERE {column} >= ? AND {column} < ? ORDER BY rowid"
        return [id_ for (id_,) in self._rows(query, (prefix, prefix_end(prefix)))]

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
            RetrieverError: the database's own structure is broken beyond that.
            StoreFullError: the disk has no room for the repair.

        """
        broken = self._broken_structure()
        if broken and repair:
            self._mend_structure()
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
                    self._run("DELETE FROM documents WHERE rowid = ?", (rowid,))
                self._run("DELETE FROM chunks WHERE document_id NOT IN (SELECT id FROM documents)")
        damaged = tuple(str(id_).encode(errors="replace").decode() for _, id_ in bad)
        return IndexReport(
            documents=len(rows),
            chunks=chunks,
            damaged=damaged,
            strays=strays,
            broken=bool(broken),
            repaired=repair,
        )

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
        return sum(1 for _ in self._chosen("SELECT c.id FROM chunks c", ids)) == len(ids)

    def texts(self, ids: Sequence[int] | None = None) -> Iterator[tuple[int, str, str, str]]:
        """Index id, document's id and title, and text of chunks, a document after the other; damage shows later.

        They are read as they are taken, all in one snapshot.

        Args:
            ids: of the chunks; None for all.
        """
        query = "SELECT c.id, d.id, d.title, c.text FROM chunks c JOIN documents d ON d.id = c.document_id"
        rows = self._chosen(query, ids)
        return ((id_, str(document_id), str(title), str(text)) for id_, document_id, title, text in rows)

    def document_texts(self, document_id: str, version: str) -> list[str]:
        """The texts of a document's chunks, in order; none where it has another version by now."""
        query = "SELECT c.text FROM chunks c JOIN documents d ON d.id = c.document_id "
        rows = self._rows(query + "WHERE d.id = ? AND d.version = ? ORDER BY c.position", (document_id, version))
        return [str(text) for (text,) in rows]

    def vectors(self, ids: Sequence[int] | None = None) -> tuple[list[int], NDArray[np.float32]]:
        """Index ids of chunks, ascending, and their vectors, float32 (N, D).

        Vectors that cannot be of this catalog are left out, and logged; one that is damaged otherwise is found out with its
        chunk, when a question comes upon it.

        Args:
            ids: of the chunks; None for all.
        """
        query = "SELECT c.id, c.document_id, c.vector FROM chunks c JOIN documents d ON d.id = c.document_id"
        return self._vectors_of(self._chosen(query, ids))

    def document_vectors(self, document_id: str) -> NDArray[np.float32]:
        """The vectors of a document's chunks, in order, float32 (N, D)."""
        query = "SELECT c.id, c.document_id, c.vector FROM chunks c WHERE c.document_id = ? ORDER BY c.id"
        return self._vectors_of(self._rows(query, (document_id,)))[1]

    def _vectors_of(self, rows: Iterable[tuple[Any, ...]]) -> tuple[list[int], NDArray[np.float32]]:
        dimensions = self.dimensions or 0
        ids: list[int] = []
        vectors: list[NDArray[np.float32]] = []
        damaged: list[str] = []
        for id_, owner, raw in rows:
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

    def _chosen(self, query: str, ids: Sequence[int] | None) -> Iterator[tuple[Any, ...]]:
        """The rows of a query over chunks `c`, by their id, which comes first; of all or of some ids.

        A part at a time, so that no statement runs long, no answer fills the memory, and a server hears of a reader that works
        long on what it reads.
        """
        query += " AND" if " WHERE " in query else " WHERE"
        if ids is None:
            last = -(2**63)
            while rows := self._rows(f"{query} c.id > ? ORDER BY c.id LIMIT {_GIVEN}", (last,)):
                yield from rows
                last = rows[-1][0]
            return
        ordered = sorted(ids)
        for start in range(0, len(ordered), _GIVEN):
            part = ordered[start : start + _GIVEN]
            yield from self._rows(f"{query} c.id IN ({', '.join('?' * len(part))}) ORDER BY c.id", part)

    def _remove(self, document_id: str) -> list[int]:
        removed = [id_ for (id_,) in self._rows("SELECT id FROM chunks WHERE document_id = ?", (document_id,))]
        self._run("DELETE FROM documents WHERE id = ?", (document_id,))
        return removed

    def _check_versions(self, expected: Mapping[str, Sequence[str | None]]) -> None:
        ids, here = sorted(expected), dict[str, str]()
        for start in range(0, len(ids), _GIVEN):
            part = ids[start : start + _GIVEN]
            here |= dict(self._rows(f"SELECT id, version FROM documents WHERE id IN ({', '.join('?' * len(part))})", part))
        for document_id, versions in expected.items():
            if here.get(document_id) not in versions:
                raise DocumentChangedError(document_id)

    def _check_format(self) -> None:
        """Refuse a database that another version of cacheblend made: two versions never share one."""
        if (found := self._meta("format")) not in (None, self.format):
            raise self._other_format(found)

    def _other_format(self, found: object) -> RetrieverError:
        return RetrieverError(
            f"{self._where} has format {found}, this version of cacheblend reads {self.format}; "
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
        self._run("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    def _unknown(self, document_id: str) -> InputError:
        return InputError(f"there is no document {document_id!r} in {self._where}; documents() lists them")


def _row(chunk: Chunk, vector_D: NDArray[np.float32]) -> tuple[str, int, str, bytes, bytes, bytes]:
    token_ids, vector = np.asarray(chunk.token_ids, dtype="<i4").tobytes(), vector_D.astype("<f4").tobytes()
    checksum = row_checksum(chunk.document_id, chunk.version, chunk.position, chunk.text, token_ids, vector)
    return chunk.document_id, chunk.position, chunk.text, token_ids, vector, checksum
