"""Documents as a user sees them: their text in the index, and the KV of their chunks in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import InputError, StoreFullError
from cacheblend.retriever import CatalogedDocument
from cacheblend.store import StoredDocument

if TYPE_CHECKING:
    from cacheblend.retriever import Chunk, Retriever
    from cacheblend.retriever.index_folder import IndexedDocuments
    from cacheblend.retriever.places import ChunkPlace
    from cacheblend.store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentStatus:
    """A document, and how much of its KV is stored.

    Args:
        id: the caller's name for it.
        title: its title; empty where the index has lost the document, as a deletion that was cut off leaves it.
        version: hash of title and text.
        chunks: chunks of its text; equal ones count each.
        pinned: whether the KV of its chunks is spared by evictions.
        stored_chunks: different chunks whose KV is stored now, for every model and codec that ingested the document.
        shared_chunks: different chunks that other documents have as well; each is stored once.
        stored_bytes: bytes of the files of its chunks' KV.
        own_bytes: the part of them that goes with the document.
        damaged: whether its id, version or title in the index is not what was written; ingested again it is whole.
    """

    id: str
    title: str
    version: str
    chunks: int
    pinned: bool
    stored_chunks: int
    shared_chunks: int
    stored_bytes: int
    own_bytes: int
    damaged: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


class Documents:
    """Lists, shows, pins and deletes documents in index and store together.

    Args:
        index: where their text is; `IndexedDocuments` where there is no model at hand.
        store: where their chunks' KV is.
        changing: held by whoever changes documents in both, so that a deletion does not come between an ingest's two halves.
        shared: other replicas change the index too: what the store alone knows was deleted there, and goes from the store by
            itself.
    """

    def __init__(
        self,
        index: Retriever | IndexedDocuments,
        store: KVStore,
        changing: AbstractContextManager[object] | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self._index, self._store, self._shared = index, store, shared
        self._changing = changing or nullcontext()

    def ls(self) -> list[DocumentStatus]:
        """Every document: those in the index in the order of adding, then by id those that the store alone knows."""
        stored = {document.id: document for document in self._store.documents.ls()}
        indexed = [_status(document, stored.pop(document.id, None)) for document in self._index.documents()]
        return indexed if self._shared else indexed + [_lost(document) for document in stored.values()]

    def page(self, limit: int, after: str | None = None) -> tuple[list[DocumentStatus], bool]:
        """A part of what `ls` gives, at the cost of that part.

        Args:
            limit: at most so many, 1 and above.
            after: those listed after the document of this id; None for the first ones.

        Returns:
            The documents, and whether more follow.

        Raises:
            InputError: there is no document `after`.
        """
        wanted = limit + 1
        in_index = after is None or self._index.document(after) is not None
        if not in_index and (self._shared or self._store.documents.version(str(after)) is None):
            raise InputError(f"after={after!r}: there is no such document any more; begin again with the first page")
        indexed = self._index.documents(wanted, after) if in_index else []
        found = [_status(document, self._store.documents.get(document.id)) for document in indexed]
        if len(found) < wanted and not self._shared:
            known = self._index.ids()
            last = "" if in_index or after is None else after
            lost = [id_ for id_ in self._store.documents.ids() if id_ > last and id_ not in known]
            for id_ in lost[: wanted - len(found)]:
                if (stored := self._store.documents.get(id_)) is not None:
                    found.append(_lost(stored))
        return found[:limit], len(found) > limit

    def show(self, id_: str) -> tuple[DocumentStatus, Sequence[Chunk]]:
        """One document and its chunks.

        Raises:
            InputError: there is no such document.
        """
        status = self.status(id_)
        try:
            return status, self._index.chunks(id_) if status.chunks else ()
        except InputError:  # deleted since it was looked up
            raise _unknown(id_) from None

    def places(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """Where each of the chunks that `show` gave stands in its file."""
        return self._index.places(chunks)

    def status(self, id_: str) -> DocumentStatus:
        """One document without its chunks; raises as `show` does."""
        document, stored = self._index.document(id_), self._store.documents.get(id_)
        if document is not None:
            return _status(document, stored)
        if stored is None or self._shared:
            raise _unknown(id_)
        return _lost(stored)

    def delete(self, id_: str) -> DocumentStatus:
        """Remove a document, pinned or not, and the KV of the chunks that no other document has; returns its last status.

        The KV goes first: where the process dies between the two, the document is still listed and can be deleted again. Both
        go under the store's lock, so that no other process's ingest notes the document between them.

        Raises:
            InputError: there is no such document.
            StoreError, RetrieverError: store or index cannot be written.
        """
        with self._changing, self._store.exclusive():
            status = self.status(id_)
            if self._store.documents.version(id_) is not None:
                self._store.documents.delete(id_)
            if self._index.document(id_) is not None:
                try:
                    self._index.delete(id_)
                except StoreFullError:  # what the KV's files left free is reserved again, or taken by others
                    if not self._store.release_reserve():
                        raise
                    self._index.delete(id_)
        return status

    def pin(self, id_: str) -> DocumentStatus:
        """Spare the KV of a document's chunks from evictions, also what is computed of it later; its status then.

        Raises:
            InputError: there is no such document, or its KV was never ingested.
        """
        self.status(id_)
        self._store.documents.pin(id_)
        return self.status(id_)

    def unpin(self, id_: str) -> DocumentStatus:
        """Let the KV of a document's chunks be evicted again; see `pin`."""
        self.status(id_)
        self._store.documents.unpin(id_)
        return self.status(id_)


def _status(document: CatalogedDocument, stored: StoredDocument | None) -> DocumentStatus:
    stored = stored or StoredDocument(document.id, document.version, False, 0, 0, 0, 0, 0, 0)
    return DocumentStatus(
        id=document.id,
        title=document.title,
        version=document.version,
        chunks=document.chunks,
        pinned=stored.pinned,
        stored_chunks=stored.stored_chunks,
        shared_chunks=stored.shared_chunks,
        stored_bytes=stored.stored_bytes,
        own_bytes=stored.own_bytes,
        damaged=document.damaged,
    )


def _lost(stored: StoredDocument) -> DocumentStatus:
    """Of a document that the store alone knows."""
    return _status(CatalogedDocument(stored.id, stored.version, "", 0, 0.0), stored)


def _unknown(id_: str) -> InputError:
    return InputError(f"there is no document {id_!r}; `cacheblend documents ls` lists them")
