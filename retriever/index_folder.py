"""An index's documents without the model's tokenizer or an embedder: listed, shown, checked and removed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from cacheblend.base.errors import RetrieverError

from .catalog import Catalog
from .document import Chunk, ChunkPlace, places_of

INDEX_FILE = "catalogue.sqlite"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _locked(
    method: Callable[Concatenate[Catalog, _Arguments], _Result],
) -> Callable[Concatenate[IndexedDocuments, _Arguments], _Result]:
    """A method of the catalog as one of `IndexedDocuments`, under its lock."""

    @functools.wraps(method)
    def call(self: IndexedDocuments, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with self._lock:
            return method(self._catalog, *args, **options)

    return call


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

    documents = _locked(Catalog.documents)
    document = _locked(Catalog.document)
    version = _locked(Catalog.version)
    ids = _locked(Catalog.ids)
    chunks = _locked(Catalog.chunks)
    verify = _locked(Catalog.verify)

    def places(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """The place of each of all the chunks of a document, in order."""
        with self._lock:
            has_overlap = self._catalog.settings.get("chunk_overlap_tokens", "0") != "0"
        return places_of(chunks, has_overlap=has_overlap)

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
