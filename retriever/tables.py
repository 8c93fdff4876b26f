"""Tables of the catalog, and their rows: documents, chunks and metadata, each with a checksum.

SQLite has no checksums of its own, so each row has one over all its columns, and every read compares it. Checksums find
damage by disks; they are no defence against someone who may write to the file.

Shapes: D dimensions.
"""

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from cacheblend.base.errors import DamagedDocumentError

from .document import CatalogedDocument, Chunk, Document
from .metadata import as_json

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    title TEXT NOT NULL,
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
CREATE TABLE IF NOT EXISTS metadata (      -- of the documents that have some
    document_id TEXT PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
    fields TEXT NOT NULL,                  -- JSON
    checksum BLOB NOT NULL                 -- of document, version and fields
);
"""
INSERT_DOCUMENT = "INSERT INTO documents (id, version, title, chunks, checksum) VALUES (?, ?, ?, ?, ?)"
INSERT_CHUNK = "INSERT INTO chunks (document_id, position, text, token_ids, vector, checksum) VALUES (?, ?, ?, ?, ?, ?)"
INSERT_METADATA = "INSERT INTO metadata VALUES (?, ?, ?)"  # of a document that has some
SELECT_METADATA = "SELECT version, fields, m.checksum FROM metadata m JOIN documents ON id = document_id WHERE id = ?"
SELECT_DOCUMENTS = "SELECT id, version, title, chunks, checksum FROM documents "
JOINED = "FROM chunks c JOIN documents d ON d.id = c.document_id"
SELECT_CHUNKS = f"""
SELECT c.document_id, d.version, c.position, d.title, c.text, c.token_ids, c.vector, c.checksum, d.chunks, d.checksum {JOINED}
"""


def row_checksum(*fields: object) -> bytes:
    """The xxh3-128 of values as SQLite returns them, each with its kind and length."""
    digest = xxhash.xxh3_128()
    for field in fields:
        kind = next((kind for kind in (bytes, str, int) if isinstance(field, kind)), object)
        raw = field if isinstance(field, bytes) else str(field).encode(errors="surrogateescape")
        digest.update(f"{kind.__name__}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()


def chunk_row(chunk: Chunk, vector_D: NDArray[np.float32]) -> tuple[object, ...]:
    """The values of `INSERT_CHUNK`."""
    token_ids, vector = np.asarray(chunk.token_ids, dtype="<i4").tobytes(), vector_D.astype("<f4").tobytes()
    checksum = row_checksum(chunk.document_id, chunk.version, chunk.position, chunk.text, token_ids, vector)
    return chunk.document_id, chunk.position, chunk.text, token_ids, vector, checksum


def metadata_row(document: Document) -> tuple[object, ...]:
    """The values of `INSERT_METADATA`."""
    fields = as_json(document.metadata)
    return document.id, fields, row_checksum(document.id, document.version, fields)


def document_of(row: tuple[Any, ...]) -> CatalogedDocument:
    """The document of a row of `SELECT_DOCUMENTS`; a damaged one is marked."""
    id_, version, title, chunks, checksum = row
    if checksum == row_checksum(id_, version, title, chunks):
        return CatalogedDocument(id_, version, title, chunks)
    chunks = chunks if isinstance(chunks, int) else 0
    return CatalogedDocument(printable(id_), printable(version), "", chunks, damaged=True)


def chunk_of(row: tuple[Any, ...]) -> Chunk:
    """The chunk of a row of `SELECT_CHUNKS`; `DamagedDocumentError` if it is not what was written."""
    document_id, version, position, title, text, token_ids, vector, checksum, chunks, document_checksum = row
    is_written = checksum == row_checksum(document_id, version, position, text, token_ids, vector)
    if not is_written or document_checksum != row_checksum(document_id, version, title, chunks):
        raise DamagedDocumentError(str(document_id))
    ids = tuple(np.frombuffer(token_ids, dtype="<i4").tolist())
    return Chunk(document_id, version, position, title, text, ids)


def printable(value: object) -> str:
    """A damaged value as text."""
    return str(value).encode(errors="replace").decode()
