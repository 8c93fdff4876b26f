"""The documents of an index on disk, for looking at and removing them without the model's tokenizer or an embedder."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from cacheblend.store.errors import RetrieverError

from .catalogue import Catalogue, CataloguedDocument
from .chunk import Chunk


class IndexedDocuments:
    """Lists and removes documents as `Retriever` does; a context manager. A retriever that is open follows what is removed.

    Args:
        directory: the index's folder (`RetrieverConfig.directory`).

    Raises:
        RetrieverError: there is no index, or it cannot be used.

    """

    def __init__(self, directory: Path) -> None:
        path = directory / "catalogue.sqlite"
        if not path.is_file():
            raise RetrieverError(f"{directory} holds no index; name the folder that documents were ingested into")
        self._catalogue = Catalogue(path, {})

    def documents(self) -> list[CataloguedDocument]:
        """Every document, in the order of adding."""
        return self._catalogue.documents()

    def chunks(self, document_id: str) -> list[Chunk]:
        """The chunks of a document, in order.

        Raises:
            InputError: there is no such document.

        """
        return self._catalogue.chunks(document_id)

    def delete(self, document_id: str) -> int:
        """Remove a document; returns how many chunks went with it.

        Raises:
            InputError: there is no such document.
            RetrieverError: the directory cannot be written.

        """
        return len(self._catalogue.remove(document_id).removed_ids)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._catalogue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
