"""Removals that the remote tier has not been told of, on disk, so that they outlive the process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from cacheblend.base.errors import StoreError
from cacheblend.base.sqlite import Database

logger = logging.getLogger(__name__)
SCHEMA = "CREATE TABLE IF NOT EXISTS removals (digest TEXT PRIMARY KEY) WITHOUT ROWID"


class RemovalLog:
    """Digests of entries that are to be removed, until they are; processes of one store share it. Thread-safe.

    A removal is never refused for its sake: where the disk has no room, it is not noted, and lost with the process.

    Args:
        path: a file, made when missing; one that is damaged is made anew.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._database = self._open(path)
        except StoreError as error:
            logger.warning("removals that the remote tier was to be told of are lost: %s", error)
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                path.with_name(name).unlink(missing_ok=True)
            self._database = self._open(path)
        self._noted = {digest for (digest,) in self._database.rows("SELECT digest FROM removals")}

    def waiting(self) -> list[str]:
        """Digests that were noted and not settled, by this process or another before it."""
        return sorted(self._noted)

    def note(self, digests: Iterable[str]) -> None:
        """Note removals, durable on return."""
        digests = set(digests) - self._noted
        self._change("INSERT OR IGNORE INTO removals VALUES (?)", digests)
        self._noted |= digests

    def settle(self, digests: Iterable[str]) -> None:
        """Forget removals: they were made, or the entries written since."""
        digests = self._noted & set(digests)
        self._change("DELETE FROM removals WHERE digest = ?", digests)
        self._noted -= digests

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._database.close()

    @staticmethod
    def _open(path: Path) -> Database:
        database = Database(path)
        try:
            with database.transaction() as connection:
                connection.execute(SCHEMA)
            database.rows("SELECT digest FROM removals LIMIT 1")
        except BaseException:
            database.close()
            raise
        return database

    def _change(self, statement: str, digests: set[str]) -> None:
        if not digests:
            return
        try:
            with self._database.transaction() as connection:
                connection.executemany(statement, [(digest,) for digest in sorted(digests)])
        except StoreError as error:
            logger.warning("removals in the remote tier are not noted on disk: %s", error)
