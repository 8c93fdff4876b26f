"""Documents of a store: pinning and removal by document instead of by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cacheblend.base.errors import InputError

from .catalog import StoredDocument
from .key import ChunkKey
from .nvme_tier import NvmeTier


class StoreDocuments:
    """Notes which chunks each document has, and drops a chunk's KV with the last document that has it. Thread-safe.

    Entries of no document, such as those of texts that a request brought itself, come and go by use alone.

    Args:
        nvme: the tier that holds the entries and the catalog.
        forget: drops what RAM and the queue of writes hold of entries that are gone.

    """

    def __init__(self, nvme: NvmeTier, forget: Callable[[Iterable[str]], None]) -> None:
        self._nvme, self._forget = nvme, forget
        self._table = nvme.documents

    def ls(self) -> list[StoredDocument]:
        """Every document, by id."""
        return self._table.ls()

    def get(self, id_: str) -> StoredDocument | None:
        """One document; None where the store knows none of that id."""
        return self._table.get(id_)

    def version(self, id_: str) -> str | None:
        """The version of a document; None where the store knows none of that id."""
        return self._table.version(id_)

    def ids(self, prefix: str = "") -> list[str]:
        """Every document's id that begins with a text, in order."""
        return self._table.ids(prefix)

    def put(self, documents: Iterable[tuple[str, str, Sequence[ChunkKey]]]) -> int:
        """Note documents and their chunks, in one transaction; stores no KV.

        Args:
            documents: `(id, version, keys)` each. With a version that is known, keys are added to those there are (another
                model's, say). Another version takes the place of the known one, and the KV of chunks that no document has any
                more is removed.

        Returns:
            How many chunks no document has any more.

        Raises:
            StoreFullError: the disk is full.
            StoreDirectoryError: the catalog cannot be written.

        """
        given = [(id_, version, [key.digest for key in keys]) for id_, version, keys in documents]
        with self._nvme.exclusive():
            return self._drop(self._table.digests(id_ for id_, _, _ in given), lambda: self._table.put(given))

    def drop_unowned(self, keys: Iterable[ChunkKey]) -> int:
        """Remove the KV of those of some chunks that no document has, written or not; gives their number.

        Raises:
            StoreFullError, StoreDirectoryError: see `put`.

        """
        digests = [key.digest for key in keys]
        with self._nvme.exclusive():
            return self._drop(digests, lambda: self._table.drop_unowned(digests))

    def delete(self, id_: str) -> int:
        """Forget a document, pinned or not, and remove the KV of chunks that no other document has; gives their number.

        Works on a full disk too: files go first there.

        Raises:
            InputError: there is no such document.

        """
        with self._nvme.exclusive():
            if self._table.version(id_) is None:
                raise InputError(f"the store knows no document {id_!r}; `cacheblend documents ls` lists them")
            own = self._table.own_digests(id_)
            return self._drop(
                self._table.digests([id_]), lambda: self._nvme.on_full_disk_too(lambda: self._table.remove(id_), own)
            )

    def pin(self, id_: str) -> None:
        """Spare the document's chunks from evictions, now and when they are stored later, by every process.

        Raises:
            InputError: there is no such document.

        """
        with self._nvme.exclusive():
            self._nvme.on_full_disk_too(lambda: self._table.set_pinned(id_, True))

    def unpin(self, id_: str) -> None:
        """Let the document's chunks be evicted again; raises as `pin` does."""
        with self._nvme.exclusive():
            self._nvme.on_full_disk_too(lambda: self._table.set_pinned(id_, False))

    def _drop(self, digests: Sequence[str], change: Callable[[], list[str]]) -> int:
        with self._nvme.changing(digests):
            dropped = change()
            self._forget(dropped)
        return len(dropped)
