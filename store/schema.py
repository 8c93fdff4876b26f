"""The tables of the catalogue.

Totals are kept by triggers: summing 100,000 rows at every put would take longer than the put. So is `entries.pinned`, since an
eviction must pass over pinned entries without reading them all.
"""

from __future__ import annotations

SCHEMA_VERSION = 2

# Whether a pinned document has the entry; the row at hand is called `entries`.
IS_PINNED = """EXISTS (
    SELECT 1 FROM document_chunks JOIN documents ON documents.id = document_chunks.document
    WHERE document_chunks.digest = entries.digest AND documents.pinned
)"""

# What the columns hold. SQLite does not hold a value against its column's type when it reads.
COLUMNS = {
    "entries": {
        **dict.fromkeys(("digest", "model", "codec", "namespace"), "text"),
        **dict.fromkeys(("tokens", "layers", "bytes", "created_ns", "used_ns", "pinned"), "integer"),
    },
    "totals": {"namespace": "text", "entries": "integer", "bytes": "integer"},
    "documents": {"id": "text", "version": "text", "pinned": "integer", "changed_ns": "integer"},
    "document_chunks": {"document": "text", "digest": "text"},
}

SCHEMA = (
    """CREATE TABLE entries (
        digest TEXT PRIMARY KEY,
        model TEXT NOT NULL,
        codec TEXT NOT NULL,
        namespace TEXT NOT NULL,
        tokens INTEGER NOT NULL,
        layers INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        created_ns INTEGER NOT NULL,
        used_ns INTEGER NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    "CREATE INDEX entries_to_evict ON entries (used_ns, digest, namespace) WHERE pinned = 0",
    """CREATE TABLE totals (
        namespace TEXT PRIMARY KEY,
        entries INTEGER NOT NULL,
        bytes INTEGER NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE documents (
        id TEXT PRIMARY KEY,
        version TEXT NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0,
        changed_ns INTEGER NOT NULL
    ) WITHOUT ROWID""",
    """CREATE TABLE document_chunks (
        document TEXT NOT NULL,
        digest TEXT NOT NULL,
        PRIMARY KEY (document, digest)
    ) WITHOUT ROWID""",
    "CREATE INDEX document_chunks_by_digest ON document_chunks (digest)",
    f"""CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
        INSERT INTO totals VALUES (new.namespace, 1, new.bytes)
        ON CONFLICT (namespace) DO UPDATE SET entries = entries + 1, bytes = bytes + excluded.bytes;
        UPDATE entries SET pinned = {IS_PINNED} WHERE digest = new.digest;
    END""",
    """CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
        UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes WHERE namespace = old.namespace;
        DELETE FROM totals WHERE namespace = old.namespace AND entries = 0;
    END""",
    f"""CREATE TRIGGER document_chunk_added AFTER INSERT ON document_chunks BEGIN
        UPDATE entries SET pinned = {IS_PINNED} WHERE digest = new.digest;
    END""",
    f"""CREATE TRIGGER document_chunk_removed AFTER DELETE ON document_chunks BEGIN
        UPDATE entries SET pinned = {IS_PINNED} WHERE digest = old.digest;
    END""",
    f"""CREATE TRIGGER document_pinned AFTER UPDATE OF pinned ON documents BEGIN
        UPDATE entries SET pinned = {IS_PINNED}
        WHERE digest IN (SELECT digest FROM document_chunks WHERE document = new.id);
    END""",
)
