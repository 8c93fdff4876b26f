"""An index's documents without the model's tokenizer or an embedder: listed, shown, checked and removed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from cacheblend.base.errors import RetrieverError

from .catalog import Catalog, CatalogedDocument, IndexReport
from .document import Chunk, ChunkPlace, places_of

INDEX_FILE = "catalogue.sqlite"


class IndexedDocuments:
    """The documents of an index, without a tokenizer or an embedder. Thread-safe; a context manager.

    A retriever that has the same index open follows what is removed.

    Args:
        catalog: closed with this object.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.RLock()  # over the catalog, and over the indexes in memory that follow it

    @classmethod
    def open(cls, directory: Path) -> IndexedDocuments:
        """The documents of an index's folder (`RetrieverConfig.directory`).

        Raises:
            RetrieverError: there is no index, or it cannot be used.
        """
        if not (directory / INDEX_FILE).is_file():
            raise RetrieverError(f"{directory} holds no index; name the folder that documents were ingested into")
        return IndexedDocuments(Catalog(directory / INDEX_FILE, {}))

    def documents(
        self, limit: int | None = None, after: str | None = None, *, newest_first: bool = False
    ) -> list[CatalogedDocument]:
        """Documents in the order of adding, or in reverse; see `Catalog.documents`.

        Raises:
            InputError: there is no document `after`.
        """
        with self._lock:
            return self._catalog.documents(limit, after, newest_first=newest_first)

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None if there is no such document."""
        with self._lock:
            return self._catalog.document(document_id)

    def version(self, document_id: str) -> str | None:
        """The version of a document; None if there is no such document."""
        with self._lock:
            return self._catalog.version(document_id)

    def ids(self, prefix: str = "") -> list[str]:
        """The ids of documents that begin with a text, in the order of adding."""
        with self._lock:
            return self._catalog.ids(prefix)

    def chunks(self, document_id: str | None = None) -> list[Chunk]:
        """The chunks of one document, or all, in the order of adding.

        Raises:
            InputError: there is no such document.
            DamagedDocumentError: its rows are not what was written.
        """
        with self._lock:
            return self._catalog.chunks(document_id)

    def places(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """The place of each of all the chunks of a document, in order."""
        with self._lock:
            has_overlap = self._catalog.settings.get("chunk_overlap_tokens", "0") != "0"
        return places_of(chunks, has_overlap=has_overlap)

    def verify(self, *, repair: bool = False) -> IndexReport:
        """Check every row; with `repair`, repair what can be repaired. See `IndexReport`.

        Raises:
            RetrieverError: the file's own structure is broken.
        """
        with self._lock:
            return self._catalog.verify(repair=repair)

    def delete(self, document_id: str) -> int:
        """Remove a document; returns how many chunks went with it.

        Raises:
            InputError: there is no such document.
            RetrieverError: the directory cannot be written.
            StoreFullError: the disk is full, and what was reserved for removals was used up by earlier ones.
        """
        with self._lock:
            return len(self._catalog.remove(document_id).removed_ids)

    def close(self) -> None:
        """Close the catalog; a second call does nothing."""
        with self._lock:
            self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
