"""Documents as a user sees them: their text in the index, and the KV of their chunks in the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from cacheblend.retriever import CataloguedDocument, Chunk
from cacheblend.store import KVStore, StoredDocument
from cacheblend.store.errors import InputError


class DocumentIndex(Protocol):
    """The index's part: `Retriever`, or `IndexedDocuments` where there is no model at hand."""

    def documents(self) -> list[CataloguedDocument]:
        """Every document, in the order of adding."""

    def chunks(self, document_id: str) -> list[Chunk]:
        """The chunks of a document."""

    def delete(self, document_id: str) -> int:
        """Remove a document."""


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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


class Documents:
    """Lists, shows, pins and deletes documents in index and store together.

    Args:
        index: where their text is.
        store: where their chunks' KV is.
        changing: held by whoever changes documents in both, so that a deletion does not come between an ingest's two halves.
    """

    def __init__(self, index: DocumentIndex, store: KVStore, changing: AbstractContextManager[object] | None = None) -> None:
        self._index, self._store = index, store
        self._changing = changing or nullcontext()

    def ls(self) -> list[DocumentStatus]:
        """Every document, in the order of adding."""
        stored = {document.id: document for document in self._store.documents.ls()}
        indexed = [_status(document, stored.pop(document.id, None)) for document in self._index.documents()]
        return indexed + [_lost(document) for document in stored.values()]

    def show(self, id_: str) -> tuple[DocumentStatus, Sequence[Chunk]]:
        """One document and its chunks.

        Raises:
            InputError: there is no such document.
        """
        status = next((status for status in self.ls() if status.id == id_), None)
        if status is None:
            raise _unknown(id_)
        try:
            return status, self._index.chunks(id_) if status.chunks else ()
        except InputError:  # deleted since it was listed
            raise _unknown(id_) from None

    def delete(self, id_: str) -> DocumentStatus:
        """Remove a document, pinned or not, and the KV of the chunks that no other document has; tells what it was.

        The KV goes first: where the process dies between the two, the document is still listed and can be deleted again.

        Raises:
            InputError: there is no such document.
            StoreError, RetrieverError: store or index cannot be written.
        """
        with self._changing:
            status, _ = self.show(id_)
            if self._store.documents.get(id_) is not None:
                self._store.documents.delete(id_)
            if status.chunks:
                self._index.delete(id_)
        return status

    def pin(self, id_: str) -> None:
        """Spare the KV of a document's chunks from evictions, also what is computed of it later.

        Raises:
            InputError: there is no such document, or its KV was never ingested.
        """
        self.show(id_)
        self._store.documents.pin(id_)

    def unpin(self, id_: str) -> None:
        """Let the KV of a document's chunks be evicted again; raises as `pin` does."""
        self.show(id_)
        self._store.documents.unpin(id_)


def _status(document: CataloguedDocument, stored: StoredDocument | None) -> DocumentStatus:
    return DocumentStatus(
        id=document.id,
        title=document.title,
        version=document.version,
        chunks=document.chunks,
        pinned=stored is not None and stored.pinned,
        stored_chunks=stored.stored_chunks if stored else 0,
        shared_chunks=stored.shared_chunks if stored else 0,
        stored_bytes=stored.stored_bytes if stored else 0,
        own_bytes=stored.own_bytes if stored else 0,
    )


def _lost(stored: StoredDocument) -> DocumentStatus:
    nothing = CataloguedDocument(stored.id, stored.version, "", 0, 0.0)
    return _status(nothing, stored)


def _unknown(id_: str) -> InputError:
    return InputError(f"there is no document {id_!r}; `cacheblend documents ls` lists them")
