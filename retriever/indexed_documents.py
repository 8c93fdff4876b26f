"""The documents of an index on disk, for looking at and removing them without the model's tokenizer or an embedder."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from cacheblend.base.errors import RetrieverError

from .catalog import Catalog, CatalogedDocument, IndexReport
from .document import Chunk

INDEX_FILE = "catalogue.sqlite"


class IndexedDocuments:
    """Lists and removes documents as `Retriever` does; a context manager. A retriever that is open follows what is removed.

    Args:
        directory: the index's folder (`RetrieverConfig.directory`).

    Raises:
        RetrieverError: there is no index, or it cannot be used.

    """

    def __init__(self, directory: Path) -> None:
        path = directory / INDEX_FILE
        if not path.is_file():
            raise RetrieverError(f"{directory} holds no index; name the folder that documents were ingested into")
        self._catalog = Catalog(path, {})

    def documents(self, limit: int | None = None, after: str | None = None) -> list[CatalogedDocument]:
        """Documents in the order of adding: at most `limit`, and those added after the document `after`.

        Raises:
            InputError: there is no document `after`.

        """
        return self._catalog.documents(limit, after)

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None where there is no such document."""
        return self._catalog.document(document_id)

    def version(self, document_id: str) -> str | None:
        """The version of a document; None where there is no such document."""
        return self._catalog.version(document_id)

    def ids(self) -> set[str]:
        """Every document's id."""
        return self._catalog.ids()

    def verify(self, *, repair: bool = False) -> IndexReport:
        """Check every row; with `repair`, mend what can be mended. See `IndexReport`.

        Raises:
            RetrieverError: the file's own structure is broken.

        """
        return self._catalog.verify(repair=repair)

    def chunks(self, document_id: str) -> list[Chunk]:
        """The chunks of a document, in order.

        Raises:
            InputError: there is no such document.
            DamagedDocumentError: its rows are not what was written.

        """
        return self._catalog.chunks(document_id)

    def delete(self, document_id: str) -> int:
        """Remove a document; returns how many chunks went with it.

        Raises:
            InputError: there is no such document.
            RetrieverError: the directory cannot be written.

        """
        return len(self._catalog.remove(document_id).removed_ids)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
