"""The catalog in PostgreSQL, which many replicas share.

One schema holds one index. All writes take one lock of the schema, so generations are in the order of the commits, and what
came and went after one can be told: a replica's vectors and words follow without reading everything anew.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import StrDumper, TextLoader

from cacheblend.base.checks import check_user_info
from cacheblend.base.errors import ConfigError, IndexUnreachableError, InputError, RetrieverError, StoreFullError

from .catalog import Catalog, Change
from .catalog_rows import INSERT_CHUNK

# Unless the URL says otherwise: a server that does not answer is found out in seconds.
CONNECTION = {
    "application_name": "cacheblend",
    "connect_timeout": 5,
    "tcp_user_timeout": 10_000,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
RETRY_S = 1.0  # after a connection was refused
# What a replica that hangs, or is cut off, may hold up: the server ends its statement, and its transaction.
SESSION = {"statement_timeout": "60s", "lock_timeout": "20s", "idle_in_transaction_session_timeout": "20s"}
MAX_NAME = 63  # bytes of a name in PostgreSQL
KEPT_GENERATIONS = 10_000  # of which removals are remembered; who is further behind reads everything anew
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    rowid BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE,
    id TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    title TEXT NOT NULL,
    created_s DOUBLE PRECISION NOT NULL,
    chunks INTEGER NOT NULL,
    checksum BYTEA NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,  -- never used twice
    document_id TEXT NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BYTEA NOT NULL,
    vector BYTEA NOT NULL,
    checksum BYTEA NOT NULL,
    generation BIGINT NOT NULL DEFAULT current_setting('cacheblend.generation')::BIGINT,
    UNIQUE (document_id, position)
);
CREATE INDEX IF NOT EXISTS documents_id ON documents (id COLLATE "C");
CREATE INDEX IF NOT EXISTS chunks_generation ON chunks (generation);
CREATE TABLE IF NOT EXISTS removed (generation BIGINT NOT NULL, chunk_id BIGINT NOT NULL, document_id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS removed_generation ON removed (generation);
"""
TOO_LARGE = "54"  # class of the errors of what is above a limit of the server, and will be the next time


class _Escape(StrDumper):
    """Text without zero characters, which PostgreSQL has not: DLE stands before it, and before itself."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\x10", "\x10\x10").replace("\0", "\x100"))


class _Unescape(TextLoader):
    """Inverse of `_Escape`."""

    def load(self, data: Any) -> str:
        text = str(super().load(data))
        if "\x10" not in text:
            return text
        return "\x10".join(part.replace("\x100", "\0") for part in text.split("\x10\x10"))


class PostgresCatalog(Catalog):
    """Documents and chunks in a schema of a PostgreSQL database.

    Args:
        url: the database, as libpq takes it (`postgresql://user@host:5432/name?sslmode=verify-full`); what it leaves out, such
            as the password, comes from libpq's variables (PGPASSWORD) or files.
        schema: made when missing.
        settings: what the chunks and vectors depend on; fixed from the first document on.

    Raises:
        ConfigError: not such a URL.
        IndexUnreachableError: the server does not answer, or refuses.
        RetrieverError: the schema is of another format, or holds documents of other settings.
    """

    format = "1"
    by_bytes = ' COLLATE "C"'

    def __init__(self, url: str, schema: str, settings: Mapping[str, str]) -> None:
        given = _parameters(url)
        self._schema = schema_name(schema)
        place = "/".join(str(given[name]) for name in ("host", "dbname") if given.get(name))
        super().__init__(f"PostgreSQL {place or 'by its defaults'}, schema {self._schema}", settings)
        self._conninfo = make_conninfo(**{**CONNECTION, **given})
        self._link: psycopg.Connection[Any] | None = None
        self._in_transaction = False
        self._refused: tuple[float, str] = (-RETRY_S, "")  # when it was last, and why
        with self._errors():
            self._make()
        try:
            self._check_format()
            if not self._is_empty():
                self._compare(self._settings)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if self._link is not None:
            self._link.close()

    def _connect(self) -> psycopg.Connection[Any]:
        """The connection, made anew where it has ended; who has just been refused is not kept waiting again."""
        if self._link is not None and not self._link.closed:
            return self._link
        when, why = self._refused
        if time.monotonic() - when < RETRY_S:
            raise psycopg.OperationalError(why)
        try:
            self._link = link = psycopg.connect(self._conninfo, autocommit=True)
        except psycopg.OperationalError as error:
            self._refused = time.monotonic(), _first_line(error)
            raise
        link.adapters.register_dumper(str, _Escape)
        link.adapters.register_loader("text", _Unescape)
        for name, value in (("search_path", sql.Identifier(self._schema)), *SESSION.items()):
            link.execute(sql.SQL("SET {} TO {}").format(sql.Identifier(name), value))
        return link

    def _make(self) -> None:
        """Make schema and tables where they are missing: a role that may not needs none of these rights."""
        link = self._connect()
        [encoding] = link.execute("SHOW server_encoding").fetchone() or [""]
        if encoding != "UTF8":
            raise self._unusable(f"the database's encoding is {encoding}, and UTF8 is needed")
        with link.transaction():
            link.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (self._schema,))
            [tables] = link.execute("SELECT to_regclass('meta')").fetchone() or [None]
            if tables is None:
                link.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
                for statement in filter(str.strip, SCHEMA.split(";")):
                    link.execute(statement)
                made = (self.format, uuid.uuid4().hex)
                link.execute("INSERT INTO meta VALUES ('format', %s), ('identity', %s), ('generation', '0')", made)

    @property
    def identity(self) -> str:
        """Random, from when the tables were made."""
        return self._meta("identity") or ""

    def changes(self, since: int) -> Change | None:
        """See `Catalog.changes`."""
        generation = self.generation
        if since < 0 or not 0 <= generation - since <= KEPT_GENERATIONS:
            return None
        removed = self._rows("SELECT chunk_id, document_id FROM removed WHERE generation > ?", (since,))
        return Change(
            added_ids=[id_ for (id_,) in self._rows("SELECT id FROM chunks WHERE generation > ? ORDER BY id", (since,))],
            removed_ids=[id_ for id_, _ in removed],
            generation=generation,
            removed_documents=frozenset(document_id for _, document_id in removed),
        )

    def _insert(self, rows: Sequence[tuple[str, int, str, bytes, bytes, bytes]]) -> list[int]:
        assert self._link is not None  # of the transaction
        with self._link.cursor() as cursor:
            cursor.executemany(f"{INSERT_CHUNK} RETURNING id".replace("?", "%s"), rows, returning=True)
            return [row[0] for _ in cursor.results() for row in cursor]

    def _remove(self, document_id: str) -> list[int]:
        removed = super()._remove(document_id)
        noted = "INSERT INTO removed SELECT ?::BIGINT, unnest(?::BIGINT[]), ?"
        self._run(noted, (self.generation, removed, document_id))
        return removed

    def _broken_structure(self) -> str:
        return ""  # the server's own affair

    def _mend_structure(self) -> None:
        """Nothing: see `_broken_structure`."""

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Catalog.snapshot`."""
        with self._transaction("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"):
            yield

    @contextmanager
    def _write(self) -> Iterator[None]:
        with self._transaction("BEGIN"):
            # Until the commit: the next one sees this one's documents, and its generation.
            self._rows("SELECT value FROM meta WHERE key = 'generation' FOR UPDATE")
            generation = self.generation + 1
            self._set_meta("generation", str(generation))
            self._rows("SELECT set_config('cacheblend.generation', ?, TRUE)", (str(generation),))
            self._run("DELETE FROM removed WHERE generation <= ?", (generation - KEPT_GENERATIONS,))
            yield

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        with self._errors():
            self._execute(begin)
            self._in_transaction, link = True, self._connect()
            try:
                yield
                link.execute("COMMIT")
            except BaseException:
                if not link.closed:
                    link.execute("ROLLBACK")
                raise
            finally:
                self._in_transaction = False

    def _execute(self, statement: str, arguments: Sequence[object] = ()) -> psycopg.Cursor[Any]:
        """Run a statement; outside of a transaction, where it reads or begins one, again where the connection had ended."""
        statement = statement.replace("?", "%s")
        link = self._link if self._in_transaction and self._link is not None else self._connect()
        try:
            return link.execute(statement, arguments)
        except psycopg.OperationalError:
            if self._in_transaction or not link.closed:
                raise
            return self._connect().execute(statement, arguments)

    def _rows(self, sql: str, arguments: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._execute(sql, arguments).fetchall()

    def _run(self, sql: str, arguments: Sequence[object] = ()) -> None:
        with self._errors():
            self._execute(sql, arguments)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.DiskFull as error:
            raise StoreFullError(f"no room on the disk of {self._where}; free space") from error
        except psycopg.OperationalError as error:
            if (error.sqlstate or "").startswith(TOO_LARGE):
                raise InputError(f"{self._where} cannot hold this: {_first_line(error)}; give it a shorter id") from error
            raise IndexUnreachableError(
                f"{self._where} cannot be reached: {_first_line(error)}; start it, or check --index"
            ) from error
        except psycopg.Error as error:
            raise self._unusable(_first_line(error)) from error

    def _unusable(self, why: object) -> RetrieverError:
        return RetrieverError(
            f"the catalog in {self._where} cannot be used: {why}; check the rights of its role, and `cacheblend store verify`"
        )


def schema_name(name: str) -> str:
    """The name of a schema, within PostgreSQL's limit: of a longer one the end is a digest, so that two never share one."""
    if len(name.encode()) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return f"{name[: MAX_NAME - len(digest) - 1]}_{digest}"


def _parameters(url: str) -> dict[str, Any]:
    check_user_info("index", url)
    try:
        return conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        allowed = "a URL such as postgresql://user@host/database, its special characters percent-encoded"
        raise ConfigError("index", "what is given (not shown)", allowed) from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
