"""Which chunks each document has, so that a chunk's KV goes with the last document that has it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cacheblend.base.errors import InputError
from cacheblend.base.sqlite import Database

_PAGE = 64


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as the store knows it; several may share chunks, each of which is stored once.

    Args:
        id: the caller's name for it.
        version: what tells its texts apart.
        pinned: whether its chunks are spared by evictions.
        changed_ns: when it came, or its version changed, in nanoseconds of Unix time.
        chunks: how many different chunks it has.
        stored_chunks: how many of them have their KV on NVMe now.
        shared_chunks: how many of them other documents have as well.
        stored_bytes: bytes of the files of its chunks' KV.
        own_bytes: the part of `stored_bytes` that is in no other document: what goes with it.

    """

    id: str
    version: str
    pinned: bool
    changed_ns: int
    chunks: int
    stored_chunks: int
    shared_chunks: int
    stored_bytes: int
    own_bytes: int


_LIST = """
SELECT d.id, d.version, d.pinned, d.changed_ns, count(c.digest), count(e.digest),
    coalesce(sum(c.shared), 0), coalesce(sum(e.bytes), 0), coalesce(sum(e.bytes * (1 - c.shared)), 0)
FROM documents d
LEFT JOIN (
    SELECT document, digest, EXISTS (
        SELECT 1 FROM document_chunks other WHERE other.digest = mine.digest AND other.document != mine.document
    ) AS shared
    FROM document_chunks mine
) c ON c.document = d.id
LEFT JOIN entries e ON e.digest = c.digest
"""


class DocumentTable:
    """Documents and their chunks' digests in the catalogue; a chunk may be listed before its KV is stored, and after."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ls(self) -> list[StoredDocument]:
        """Every document, by id."""
        return [_document(row) for row in self._database.rows(_LIST + "GROUP BY d.id ORDER BY d.id")]

    def pages(self) -> Iterator[list[tuple[str, str, bool]]]:
        """Every document's id, version and whether it is pinned, by id, a page at a time."""
        query, last = "SELECT id, version, pinned FROM documents WHERE id > ? ORDER BY id LIMIT ?", ""
        while page := self._database.rows(query, last, _PAGE):
            yield [(id_, version, bool(pinned)) for id_, version, pinned in page]
            last = page[-1][0]

    def get(self, id_: str) -> StoredDocument | None:
        """One document; None where there is no such document."""
        rows = self._database.rows(_LIST + "WHERE d.id = ? GROUP BY d.id", id_)
        return _document(rows[0]) if rows else None

    def version(self, id_: str) -> str | None:
        """The version of a document; None where there is no such document."""
        rows = self._database.rows("SELECT version FROM documents WHERE id = ?", id_)
        return rows[0][0] if rows else None

    def ids(self) -> list[str]:
        """Every document's id, in order."""
        return [id_ for (id_,) in self._database.rows("SELECT id FROM documents ORDER BY id")]

    def has_chunk(self, digest: str) -> bool:
        """Whether any document has a chunk."""
        return bool(self._database.rows("SELECT 1 FROM document_chunks WHERE digest = ? LIMIT 1", digest))

    def own_digests(self, id_: str) -> list[str]:
        """Digests of the chunks that no other document has: what goes with the document."""
        query = (
            "SELECT digest FROM document_chunks mine WHERE document = ? AND NOT EXISTS "
            "(SELECT 1 FROM document_chunks other WHERE other.digest = mine.digest AND other.document != mine.document)"
        )
        return [digest for (digest,) in self._database.rows(query, id_)]

    def digests(self, ids: Iterable[str]) -> list[str]:
        """Digests of the chunks of these documents, each once."""
        query = "SELECT digest FROM document_chunks WHERE document = ?"
        return list(dict.fromkeys(digest for id_ in ids for (digest,) in self._database.rows(query, id_)))

    def put(self, documents: Sequence[tuple[str, str, Sequence[str]]]) -> list[str]:
        """Note documents: `(id, version, digests)`; gives the digests that were dropped.

        A known version gains the digests that are new; another version takes the known one's place, and entries that no
        document has any more are removed from the catalogue. A document stays pinned.
        """
        now_ns = time.time_ns()
        before = self.digests(id_ for id_, _, _ in documents)
        with self._database.transaction() as transaction:
            for id_, version, digests in documents:
                transaction.execute(
                    "DELETE FROM document_chunks WHERE document = ? AND EXISTS "
                    "(SELECT 1 FROM documents WHERE id = document AND version != ?)",
                    (id_, version),
                )
                transaction.execute(
                    "INSERT INTO documents VALUES (?, ?, 0, ?) ON CONFLICT (id) DO UPDATE SET "
                    "version = excluded.version, changed_ns = excluded.changed_ns WHERE version != excluded.version",
                    (id_, version, now_ns),
                )
                rows = ((id_, digest) for digest in digests)
                transaction.executemany("INSERT OR IGNORE INTO document_chunks VALUES (?, ?)", rows)
            return _drop_unused(transaction, before)

    def remove(self, id_: str) -> list[str]:
        """Forget a document; gives the digests that were dropped, since no other document has them."""
        before = self.digests([id_])
        with self._database.transaction() as transaction:
            transaction.execute("DELETE FROM documents WHERE id = ?", (id_,))
            transaction.execute("DELETE FROM document_chunks WHERE document = ?", (id_,))
            return _drop_unused(transaction, before)

    def drop_unowned(self, digests: Sequence[str]) -> list[str]:
        """Remove the entries of those of some digests that no document has; gives those digests."""
        with self._database.transaction() as transaction:
            return _drop_unused(transaction, digests)

    def set_pinned(self, id_: str, pinned: bool) -> None:
        """Pin or unpin a document.

        Raises:
            InputError: there is no such document.

        """
        with self._database.transaction() as transaction:
            if not transaction.execute("UPDATE documents SET pinned = ? WHERE id = ?", (pinned, id_)).rowcount:
                raise InputError(f"the store knows no document {id_!r}; `cacheblend documents ls` lists them")


def _drop_unused(transaction: sqlite3.Connection, digests: Iterable[str]) -> list[str]:
    used = "SELECT 1 FROM document_chunks WHERE digest = ? LIMIT 1"
    unused = [digest for digest in digests if transaction.execute(used, (digest,)).fetchone() is None]
    transaction.executemany("DELETE FROM entries WHERE digest = ?", ((digest,) for digest in unused))
    return unused


def _document(row: tuple[str, str, int, int, int, int, int, int, int]) -> StoredDocument:
    id_, version, pinned, *counts = row
    return StoredDocument(id_, version, bool(pinned), *counts)
