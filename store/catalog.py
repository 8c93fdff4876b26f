"""Catalog: the SQLite tables of entries on NVMe, with sizes and last use, and of the documents whose chunks they are."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cacheblend.base.errors import InputError, StoreDirectoryError, StoreError
from cacheblend.base.sqlite import Database, prefix_end

from .chunk import PASSAGES, ChunkKey

if TYPE_CHECKING:
    from .nvme_tier import NvmeTier
    from .write_queue import DocumentVersion

SCHEMA_VERSION = 4

_OF_PASSAGES = f"namespace >= '{PASSAGES}' AND namespace < '{PASSAGES[:-1]};'"
_TABLES = ("entries", "totals", "documents", "document_chunks")

SCHEMA = (
    """CREATE TABLE entries (
        digest TEXT PRIMARY KEY, model TEXT NOT NULL, codec TEXT NOT NULL, namespace TEXT NOT NULL,
        tokens INTEGER NOT NULL, layers INTEGER NOT NULL, bytes INTEGER NOT NULL,
        created_ns INTEGER NOT NULL, used_ns INTEGER NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX entries_to_evict ON entries (used_ns, digest)",
    f"CREATE INDEX passages_to_evict ON entries (used_ns, digest) WHERE {_OF_PASSAGES}",
    "CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL)",
    "INSERT INTO totals VALUES (0, 0)",
    """CREATE TABLE documents (
        id TEXT PRIMARY KEY, version TEXT NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE document_chunks (
        document TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (document, digest)
    ) WITHOUT ROWID""",
    "CREATE INDEX document_chunks_by_digest ON document_chunks (digest)",
    """CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
        UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes;
    END""",
    """CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
        UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes;
    END""",
)


logger = logging.getLogger(__name__)

_MAX_TOUCHED = 1024
_COLUMNS = "digest, model, codec, namespace, tokens, layers, bytes, created_ns, used_ns"
_NO_DIGEST = "(length(digest) != 64 OR digest GLOB '*[^0-9a-f]*')"
_MAX_NS = 2**62  # the year 2116: a time of use beyond it is no time
_TOTALS = "SELECT count(*), coalesce(sum(bytes), 0) FROM entries"


class CatalogEntry(NamedTuple):
    """An entry as the catalog lists it; `bytes` of its file, times in nanoseconds of Unix time."""

    key: ChunkKey
    tokens: int
    layers: int
    bytes: int
    created_ns: int
    used_ns: int


class Catalog:
    """The table of entries; thread-safe. Several processes may share the file; the first opening must be under their lock.

    Uses are noted in memory and written with the next change, so that a hit costs no transaction; a crash forgets the last
    1,024 at most. Times of use only ever grow, even where the clock goes back.

    Args:
        path: the file, made when missing.
        found: finds the entries of a store whose catalog is gone.

    Raises:
        StoreDirectoryError: the file cannot be used, or is of another schema.
    """

    def __init__(self, path: Path, found: Callable[[], Iterable[CatalogEntry]]) -> None:
        self.database = Database(path)
        self._touch_lock = threading.Lock()
        self._touched: dict[str, int] = {}
        self._last_ns = 0
        try:
            self._prepare(path, found)
            ((self._last_ns,),) = self.database.rows("SELECT coalesce(max(used_ns), 0) FROM entries")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a second call does nothing. Uses that were not written yet are lost: see `save_uses`."""
        self.database.close()

    def __contains__(self, digest: str) -> bool:
        return bool(self.database.rows("SELECT 1 FROM entries WHERE digest = ?", digest))

    def totals(self) -> tuple[int, int]:
        """Number of entries, and bytes of their files."""
        ((entries, total_bytes),) = self.database.rows("SELECT entries, bytes FROM totals")
        return entries, total_bytes

    def document_version(self, id_: str) -> str | None:
        """The version of a document; None if the store knows no document of that id."""
        rows = self.database.rows("SELECT version FROM documents WHERE id = ?", id_)
        return rows[0][0] if rows else None

    def has_document(self, digest: str) -> bool:
        return bool(self.database.rows("SELECT 1 FROM document_chunks WHERE digest = ? LIMIT 1", digest))

    def touch(self, digest: str) -> None:
        """Note that an entry is used now."""
        used_ns = self.now_ns()
        with self._touch_lock:
            known = len(self._touched)
            self._touched[digest] = used_ns
            full = known < len(self._touched) and len(self._touched) % _MAX_TOUCHED == 0  # once: the disk may be full
        if full:
            try:
                self.save_uses()
            except StoreError as error:
                logger.warning("times of use are kept in memory for now: %s", error)

    def now_ns(self) -> int:
        """The time, later than any that this catalog gave or holds."""
        with self._touch_lock:
            self._last_ns = max(self._last_ns + 1, time.time_ns())
            return self._last_ns

    def change(
        self, *, add: Sequence[CatalogEntry] = (), remove: Iterable[str] = (), chunks: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Add entries and remove others in one transaction, synced to the disk on return.

        Args:
            add: entries that are new, or take the place of those of their keys.
            remove: digests.
            chunks: `(document, digest)`: chunks that these documents have from now on.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the file cannot be written.
        """
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        try:
            with self.database.transaction() as transaction:
                uses = ((used_ns, digest) for digest, used_ns in touched.items())
                transaction.executemany("UPDATE entries SET used_ns = max(used_ns, ?) WHERE digest = ?", uses)
                gone = [*remove, *(entry.key.digest for entry in add)]
                transaction.executemany("DELETE FROM entries WHERE digest = ?", ((digest,) for digest in gone))
                _insert(transaction, add)
                transaction.executemany("INSERT OR IGNORE INTO document_chunks VALUES (?, ?)", chunks)
        except BaseException:
            with self._touch_lock:
                self._touched = touched | self._touched
            raise

    def save_uses(self) -> None:
        """Write the uses that were noted; raises as `change` does."""
        if self._touched:
            self.change()

    def evictable(self) -> Iterator[tuple[str, int]]:
        """Digest and bytes of all entries: passages, then others, the least recently used first."""
        self.save_uses()
        for rows in (_OF_PASSAGES, f"NOT ({_OF_PASSAGES})"):
            query = f"SELECT digest, bytes, used_ns FROM entries WHERE {rows} AND (used_ns, digest) > (?, ?) "
            last = (-1, "")
            while page := self.database.rows(f"{query} ORDER BY used_ns, digest LIMIT 64", *last):
                for digest, entry_bytes, used_ns in page:
                    last = (used_ns, digest)
                    yield digest, entry_bytes

    def passages(self, namespace: str) -> list[tuple[str, int]]:
        """Digest and bytes of the entries of a namespace that begins with `PASSAGES`, the least recently used first."""
        self.save_uses()
        query = f"SELECT digest, bytes FROM entries WHERE {_OF_PASSAGES} AND namespace = ? ORDER BY used_ns, digest"
        return self.database.rows(query, namespace)

    def entries(self) -> Iterator[CatalogEntry]:
        """Every entry by digest, as it is when its page is read, so that no transaction stays open; memory holds a page."""
        self.save_uses()
        query, last = f"SELECT {_COLUMNS} FROM entries WHERE digest > ? ORDER BY digest LIMIT 256", ""
        while page := self.database.rows(query, last):
            for row in page:
                yield CatalogEntry(ChunkKey(*row[:4]), *row[4:])
            last = page[-1][0]

    def is_miscounted(self) -> bool:
        """Whether totals are not what they are when counted anew."""
        return bool(self.database.rows("SELECT * FROM totals") != self.database.rows(_TOTALS))

    def count_unowned(self) -> int:
        """Count the entries that no document refers to."""
        query = "SELECT count(*) FROM entries WHERE digest NOT IN (SELECT digest FROM document_chunks)"
        return int(self.database.rows(query)[0][0])

    def count_anew(self, file_bytes: Iterable[tuple[int, str]] = ()) -> None:
        """Note the bytes of files, each before its digest, and count totals from the rows that they follow from."""
        with self.database.transaction() as transaction:
            transaction.executemany("UPDATE entries SET bytes = ? WHERE digest = ?", file_bytes)
            transaction.execute("DELETE FROM totals")
            transaction.execute(f"INSERT INTO totals {_TOTALS}")

    def _check_rows(self) -> None:
        """Refuse rows of which a bad disk has altered a value's kind, and repair what follows from others."""
        for table in _TABLES:  # SQLite does not hold a value against its column's type when it reads
            columns = self.database.rows("SELECT name, lower(type) FROM pragma_table_info(?)", table)
            wrong = " OR ".join(f"typeof({name}) != '{kind}'" for name, kind in columns)
            if self.database.rows(f"SELECT 1 FROM {table} WHERE {wrong} LIMIT 1"):
                raise self.database.unusable(f"a row of the table {table} is damaged")
        for table in ("entries", "document_chunks"):  # a damaged digest is no name of a file
            if self.database.rows(f"SELECT 1 FROM {table} WHERE {_NO_DIGEST} LIMIT 1"):
                logger.warning("rows of the table %s with damaged keys are dropped; `store verify --repair` finds files", table)
                with self.database.transaction() as transaction:
                    transaction.execute(f"DELETE FROM {table} WHERE {_NO_DIGEST}")
        if self.is_miscounted():
            logger.warning("the totals of the catalog are not those of its rows, and are counted anew")
            self.count_anew()
        if self.database.rows("SELECT 1 FROM entries WHERE used_ns > ? LIMIT 1", _MAX_NS):
            with self.database.transaction() as transaction:
                transaction.execute("UPDATE entries SET used_ns = created_ns % ?", (_MAX_NS,))

    def _prepare(self, path: Path, found: Callable[[], Iterable[CatalogEntry]]) -> None:
        ((version,),) = self.database.rows("PRAGMA user_version")
        if version == 0:
            # One transaction: a crash leaves no catalog that lacks half of the files.
            with self.database.transaction() as transaction:
                for statement in SCHEMA:
                    transaction.execute(statement)
                _insert(transaction, found())
                transaction.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            remedy = "use the version that made it, or a new folder"
            raise StoreDirectoryError(f"{path} has schema {version}, and this version reads {SCHEMA_VERSION}; {remedy}")
        else:
            self._check_rows()


def _insert(transaction: sqlite3.Connection, entries: Iterable[CatalogEntry]) -> None:
    transaction.executemany(
        f"INSERT INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((entry.key.digest, entry.key.model, entry.key.codec, entry.key.namespace, *entry[1:]) for entry in entries),
    )


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as the store knows it; several may share chunks, each of which is stored once."""

    id: str
    version: str  # tells its texts apart
    chunks: int  # different ones
    stored_chunks: int  # of these: their KV is on NVMe now
    shared_chunks: int  # of these: other documents have them as well
    stored_bytes: int  # of the files of its chunks' KV
    own_bytes: int  # of these: in no other document, and removed with this one


_CHUNKS = """(
    SELECT document, digest, EXISTS (
        SELECT 1 FROM document_chunks other WHERE other.digest = mine.digest AND other.document != mine.document
    ) AS shared
    FROM document_chunks mine
)"""
_DOCUMENT = f"""
SELECT d.id, d.version, count(c.digest), count(e.digest),
    coalesce(sum(c.shared), 0), coalesce(sum(e.bytes), 0), coalesce(sum(e.bytes * (1 - c.shared)), 0)
FROM documents d LEFT JOIN {_CHUNKS} c ON c.document = d.id LEFT JOIN entries e ON e.digest = c.digest
WHERE d.id = ? GROUP BY d.id
"""
_OWN = f"SELECT digest FROM {_CHUNKS} WHERE document = ? AND NOT shared"

_Change = Callable[[sqlite3.Connection], None]  # of the rows of documents


class DocumentTable:
    """Documents and the digests of their chunks; a chunk's KV goes with the last document that has the chunk. Thread-safe.

    A chunk may be listed before its KV is stored, and after. Entries of no document, such as those of texts that a request
    brought itself, come and go by use.

    Args:
        nvme: the tier that holds the entries and the catalog.
        forget: drops the copies in RAM, the queued writes and, if asked to, the remote objects of entries that are gone.
    """

    def __init__(self, nvme: NvmeTier, forget: Callable[[Sequence[str], bool], None]) -> None:
        self._nvme, self._forget, self._database = nvme, forget, nvme.catalog.database

    def get(self, id_: str) -> StoredDocument | None:
        """One document; None if the store knows no document of that id."""
        return next((StoredDocument(*row) for row in self._database.rows(_DOCUMENT, id_)), None)

    def version(self, id_: str) -> str | None:
        """The version of a document; None if the store knows no document of that id."""
        return self._nvme.catalog.document_version(id_)

    def ids(self, prefix: str = "") -> list[str]:
        """Every document's id that begins with a text, in order."""
        within, bounds = ("WHERE id >= ? AND id < ?", (prefix, prefix_end(prefix))) if prefix else ("", ())
        rows = self._database.rows(f"SELECT id FROM documents {within} ORDER BY id", *bounds)
        return [id_ for (id_,) in rows]

    def put(self, documents: Iterable[tuple[str, str, Sequence[ChunkKey]]]) -> int:
        """Note documents and their chunks, in one transaction; stores no KV.

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
        given = list(documents)

        def change(transaction: sqlite3.Connection) -> None:
            for id_, version, keys in given:
                replaced = "SELECT id FROM documents WHERE id = ? AND version != ?"
                transaction.execute(f"DELETE FROM document_chunks WHERE document IN ({replaced})", (id_, version))
                transaction.execute(f"DELETE FROM documents WHERE id IN ({replaced})", (id_, version))
                transaction.execute("INSERT OR IGNORE INTO documents VALUES (?, ?)", (id_, version))
                rows = ((id_, key.digest) for key in keys)
                transaction.executemany("INSERT OR IGNORE INTO document_chunks VALUES (?, ?)", rows)

        with self._nvme.exclusive():
            return self._change(change, self._digests(id_ for id_, _, _ in given))

    def note(self, chunks: Iterable[tuple[DocumentVersion | None, ChunkKey]]) -> None:
        """Note chunks whose KV is fetched as their documents', where the store knows these in these versions still.

        Chunks of no document and those of a namespace stay nobody's.
        """
        rows = [(key.digest, *document) for document, key in chunks if document is not None and not key.namespace]
        insert = "INSERT OR IGNORE INTO document_chunks SELECT id, ? FROM documents WHERE id = ? AND version = ?"
        if rows:
            with self._nvme.exclusive(), self._database.transaction() as transaction:
                transaction.executemany(insert, rows)

    def drop_unowned(self, keys: Iterable[ChunkKey]) -> int:
        """Remove the KV of those of some chunks that no document has, written or not; returns their number. See `put`."""
        with self._nvme.exclusive():
            return self._change(lambda _: None, [key.digest for key in keys])

    def drop_others(self, model: str, codec: str) -> None:
        """Remove all KV of other models and codecs than these, and what documents have of chunks without KV; as `delete`.

        The remote tier keeps its objects, which other stores may use.
        """

        def change(transaction: sqlite3.Connection) -> None:
            transaction.executemany("DELETE FROM document_chunks WHERE digest = ?", rows)
            transaction.execute("DELETE FROM document_chunks WHERE digest NOT IN (SELECT digest FROM entries)")

        with self._nvme.exclusive():
            rows = self._database.rows("SELECT digest FROM entries WHERE model != ? OR codec != ?", model, codec)
            gone = [digest for (digest,) in rows]
            self._change(change, gone, gone, remote=False)
            self.forget_texts(())

    def delete(self, id_: str) -> int:
        """Forget a document, and remove the KV of chunks that no other document has; returns their number.

        Works on a full disk too, where files are removed first.

        Raises:
            InputError: there is no such document.
        """

        def change(transaction: sqlite3.Connection) -> None:
            transaction.execute("DELETE FROM documents WHERE id = ?", (id_,))
            transaction.execute("DELETE FROM document_chunks WHERE document = ?", (id_,))

        with self._nvme.exclusive():
            if self.version(id_) is None:
                raise InputError(f"the store knows no document {id_!r}; `cacheblend documents ls` lists them")
            own = [digest for (digest,) in self._database.rows(_OWN, id_)]
            return self._change(change, self._digests([id_]), own)

    def forget_texts(self, texts: Collection[Sequence[int]]) -> None:
        """Remove what is left of the texts of deleted documents, given as token ids.

        That is KV of no document with these tokens, as a salt, or a request that brought the text, has left it; the files that
        were set aside, whatever they hold; and the names in the catalog's log. Raises as `delete`.
        """
        wanted = set(map(tuple, texts))
        lengths = ", ".join(map(str, {len(text) for text in wanted}))
        query = f"SELECT digest FROM entries WHERE tokens IN ({lengths}) AND digest NOT IN (SELECT digest FROM document_chunks)"
        with self._nvme.exclusive():
            gone = list[str]()
            for (digest,) in self._database.rows(query):
                if (file := self._nvme.open(digest, is_use=False)) is None:
                    gone += [digest] * (digest in self._nvme)  # too many open files, say: it may have such a text
                    continue
                with file:
                    gone += [digest] * (file.info.token_ids in wanted)
            if gone:
                self._change(lambda _: None, gone, gone)
            self._nvme.folder.clear_damaged()
            self._database.truncate_log()

    def _digests(self, ids: Iterable[str]) -> list[str]:
        """Digests of the chunks of these documents, each once."""
        query = "SELECT digest FROM document_chunks WHERE document = ?"
        return list(dict.fromkeys(digest for id_ in ids for (digest,) in self._database.rows(query, id_)))

    def _change(self, change: _Change, digests: Sequence[str], own: Sequence[str] = (), *, remote: bool = True) -> int:
        """Change documents, and remove the KV of those chunks that no document has then, in one transaction.

        Args:
            change: changes the rows of documents.
            digests: the chunks that may have lost their last document.
            own: the entries that go in any case; see `on_full_disk_too`.
            remote: whether the remote tier's objects go, too.

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
            dropped = self._nvme.on_full_disk_too(commit, own)
            self._forget(dropped, remote)
        return len(dropped)
