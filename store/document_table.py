"""Documents of a store: which chunks each of them has, and pinning and removal by document instead of by chunk."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheblend.base.errors import InputError
from cacheblend.base.sqlite import prefix_end

if TYPE_CHECKING:
    from .chunk import ChunkKey
    from .nvme_tier import NvmeTier


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as the store knows it; several may share chunks, each of which is stored once.

    Args:
        id: the caller's name for it.
        version: tells its texts apart.
        pinned: whether evictions spare its chunks.
        changed_ns: when it came, or its version changed, in nanoseconds of Unix time.
        chunks: how many different chunks it has.
        stored_chunks: how many of them have their KV on NVMe now.
        shared_chunks: how many of them other documents have as well.
        stored_bytes: bytes of the files of its chunks' KV.
        own_bytes: the part of `stored_bytes` that is in no other document, and is removed with it.
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
_OWN = """
SELECT digest FROM document_chunks mine WHERE document = ? AND NOT EXISTS (
    SELECT 1 FROM document_chunks other WHERE other.digest = mine.digest AND other.document != mine.document
)
"""


class DocumentTable:
    """Documents and the digests of their chunks; a chunk's KV goes with the last document that has the chunk. Thread-safe.

    A chunk may be listed before its KV is stored, and after. Entries of no document, such as those of texts that a request
    brought itself, come and go by use.

    Args:
        nvme: the tier that holds the entries and the catalog.
        forget: drops the copies in RAM, the queued writes and the remote objects of entries that are gone.
    """

    def __init__(self, nvme: NvmeTier, forget: Callable[[Iterable[str]], None]) -> None:
        self._nvme, self._forget, self._database = nvme, forget, nvme.catalog.database

    def ls(self) -> list[StoredDocument]:
        """Every document, by id."""
        return [_document(row) for row in self._database.rows(_LIST + "GROUP BY d.id ORDER BY d.id")]

    def get(self, id_: str) -> StoredDocument | None:
        """One document; None if the store knows no document of that id."""
        rows = self._database.rows(_LIST + "WHERE d.id = ? GROUP BY d.id", id_)
        return _document(rows[0]) if rows else None

    def version(self, id_: str) -> str | None:
        """The version of a document; None if the store knows no document of that id."""
        return self._nvme.catalog.document_version(id_)

    def ids(self, prefix: str = "") -> list[str]:
        """Every document's id that begins with a text, in order."""
        end = prefix_end(prefix) if prefix else chr(sys.maxunicode)
        rows = self._database.rows("SELECT id FROM documents WHERE id >= ? AND id < ? ORDER BY id", prefix, end)
        return [id_ for (id_,) in rows]

    def put(self, documents: Iterable[tuple[str, str, Sequence[ChunkKey]]]) -> int:
        """Note documents and their chunks, in one transaction; stores no KV. A document stays pinned.

        Args:
            documents: `(id, version, keys)` each. With a version that is known, keys are added to those there are (another
                model's, say). Another version replaces the known one, and the KV of chunks that no document has any more is
                removed.

        Returns:
            How many chunks no document has any more.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the catalog cannot be written.
        """
        given, now_ns = list(documents), time.time_ns()

        def change(transaction: sqlite3.Connection) -> None:
            for id_, version, keys in given:
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
                rows = ((id_, key.digest) for key in keys)
                transaction.executemany("INSERT OR IGNORE INTO document_chunks VALUES (?, ?)", rows)

        with self._nvme.exclusive():
            return self._change(change, self._digests(id_ for id_, _, _ in given))

    def drop_unowned(self, keys: Iterable[ChunkKey]) -> int:
        """Remove the KV of those of some chunks that no document has, written or not; returns their number. See `put`."""
        with self._nvme.exclusive():
            return self._change(lambda _: None, [key.digest for key in keys])

    def delete(self, id_: str) -> int:
        """Forget a document, pinned or not, and remove the KV of chunks that no other document has; returns their number.

        Works on a full disk too, where files are removed first.

        Raises:
            InputError: there is no such document.
        """

        def change(transaction: sqlite3.Connection) -> None:
            transaction.execute("DELETE FROM documents WHERE id = ?", (id_,))
            transaction.execute("DELETE FROM document_chunks WHERE document = ?", (id_,))

        with self._nvme.exclusive():
            if self.version(id_) is None:
                raise _unknown(id_)
            own = [digest for (digest,) in self._database.rows(_OWN, id_)]
            return self._change(change, self._digests([id_]), own)

    def pin(self, id_: str) -> None:
        """Spare the document's chunks from evictions, now and when they are stored later, by every process.

        Raises:
            InputError: there is no such document.
        """
        self._set_pinned(id_, True)

    def unpin(self, id_: str) -> None:
        """Let the document's chunks be evicted again; raises as `pin` does."""
        self._set_pinned(id_, False)

    def _set_pinned(self, id_: str, pinned: bool) -> None:
        def change() -> int:
            with self._database.transaction() as transaction:
                return transaction.execute("UPDATE documents SET pinned = ? WHERE id = ?", (pinned, id_)).rowcount

        with self._nvme.exclusive():
            if not self._nvme.on_full_disk_too(change):
                raise _unknown(id_)

    def _digests(self, ids: Iterable[str]) -> list[str]:
        """Digests of the chunks of these documents, each once."""
        query = "SELECT digest FROM document_chunks WHERE document = ?"
        return list(dict.fromkeys(digest for id_ in ids for (digest,) in self._database.rows(query, id_)))

    def _change(
        self, change: Callable[[sqlite3.Connection], None], digests: Sequence[str], own: Sequence[str] | None = None
    ) -> int:
        """Change documents, and remove the KV of those chunks that no document has then, in one transaction.

        Args:
            change: changes the rows of documents.
            digests: the chunks that may have lost their last document.
            own: the entries that go in any case, where the change frees room; see `on_full_disk_too`.

        Returns:
            How many of the chunks no document has.
        """

        def commit() -> list[str]:
            with self._database.transaction() as transaction:
                change(transaction)
                used = "SELECT 1 FROM document_chunks WHERE digest = ? LIMIT 1"
                unused = [digest for digest in digests if transaction.execute(used, (digest,)).fetchone() is None]
                transaction.executemany("DELETE FROM entries WHERE digest = ?", ((digest,) for digest in unused))
                return unused

        with self._nvme.changing(digests):
            dropped = commit() if own is None else self._nvme.on_full_disk_too(commit, own)
            self._forget(dropped)
        return len(dropped)


def _unknown(id_: str) -> InputError:
    return InputError(f"the store knows no document {id_!r}; `cacheblend documents ls` lists them")


def _document(row: tuple[str, str, int, int, int, int, int, int, int]) -> StoredDocument:
    id_, version, pinned, *counts = row
    return StoredDocument(id_, version, bool(pinned), *counts)
