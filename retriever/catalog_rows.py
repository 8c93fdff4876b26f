"""Rows of the catalog: their tables, and a checksum over all that each holds.

SQLite has no checksums of its own. These find what disks do, and are no defence against someone who may write to the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from cacheblend.base.errors import DamagedDocumentError

from .document import Chunk

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    title TEXT NOT NULL,
    created_s REAL NOT NULL,
    chunks INTEGER NOT NULL DEFAULT 0,     -- how many the document has
    checksum BLOB NOT NULL DEFAULT x''     -- of id, version, title and number of chunks
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the index's id; never used twice
    document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,               -- int32, little-endian
    vector BLOB NOT NULL,                  -- float32, little-endian
    checksum BLOB NOT NULL DEFAULT x'',    -- of document, version, position, text, token ids and vector
    UNIQUE (document_id, position)
);
"""
TO_FORMAT_2 = [
    f"ALTER TABLE {table} ADD COLUMN {column}"
    for table, column in (
        ("documents", "chunks INTEGER NOT NULL DEFAULT 0"),
        ("documents", "checksum BLOB NOT NULL DEFAULT x''"),
        ("chunks", "checksum BLOB NOT NULL DEFAULT x''"),
    )
]
INSERT_CHUNK = "INSERT INTO chunks (document_id, position, text, token_ids, vector, checksum) VALUES (?, ?, ?, ?, ?, ?)"
SELECT_DOCUMENTS = "SELECT id, version, title, chunks, created_s, checksum FROM documents "
SELECT_CHUNKS = """
SELECT c.document_id, d.version, c.position, d.title, c.text, c.token_ids, c.vector, c.checksum, d.chunks, d.checksum
FROM chunks c JOIN documents d ON d.id = c.document_id
"""


@dataclass(frozen=True, slots=True)
class CatalogedDocument:
    """A document as the catalog lists it; `created_s` is Unix time.

    Of a `damaged` one id, title, version or the number of chunks is not what was written; its title is left out.
    """

    id: str
    version: str
    title: str
    chunks: int
    created_s: float
    damaged: bool = False


def document_of(row: tuple[Any, ...]) -> CatalogedDocument:
    """The document of a row of `SELECT_DOCUMENTS`; a damaged one is marked."""
    id_, version, title, chunks, created_s, checksum = row
    if checksum == row_checksum(id_, version, title, chunks):
        return CatalogedDocument(id_, version, title, chunks, created_s)
    printable_id, printable_version = (str(value).encode(errors="replace").decode() for value in (id_, version))
    return CatalogedDocument(printable_id, printable_version, "", chunks if isinstance(chunks, int) else 0, 0.0, damaged=True)


def chunk_of(row: tuple[Any, ...]) -> Chunk:
    """The chunk of a row of `SELECT_CHUNKS`.

    Raises:
        DamagedDocumentError: the row is not what was written.
    """
    document_id, version, position, title, text, token_ids, vector, checksum, chunks, document_checksum = row
    if checksum != row_checksum(document_id, version, position, text, token_ids, vector) or document_checksum != row_checksum(
        document_id, version, title, chunks
    ):
        raise DamagedDocumentError(str(document_id))
    ids = tuple(np.frombuffer(token_ids, dtype="<i4").tolist())
    return Chunk(document_id, version, position, title, text, ids)


def row_checksum(*fields: object) -> bytes:
    """The xxh3-128 of values as SQLite gives them, each with its kind and length."""
    digest = xxhash.xxh3_128()
    for field in fields:
        kind = next((kind for kind in (bytes, str, int) if isinstance(field, kind)), object)
        raw = field if isinstance(field, bytes) else str(field).encode(errors="surrogateescape")
        digest.update(f"{kind.__name__}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()
