"""An index folder, without the model's tokenizer or an embedder: documents listed, checked and removed; folders merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cacheblend.base.errors import RetrieverError
from cacheblend.base.files import make_folder

from .catalog import Catalog
from .places import places_of

if TYPE_CHECKING:
    from .catalog import IndexReport
    from .catalog_rows import CatalogedDocument
    from .document import Chunk
    from .places import ChunkPlace

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
        """Check every row; with `repair`, repair what can be repaired. See `IndexReport`.

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

    def places(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """The place of each of all the chunks of a document, in order."""
        return places_of(chunks, has_overlap=self._catalog.settings.get("chunk_overlap_tokens", "0") != "0")

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


def merge_indexes(sources: Sequence[Path], target: Path, *, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Add the documents of indexes to one, in this order; one of a known id and another text takes that one's place.

    Each document is copied whole or not at all, so that the same call goes on where it was cut off. A retriever that has the
    target open follows.

    Args:
        sources: the indexes' folders (`RetrieverConfig.directory`).
        target: the folder of the index to add to, made when missing, with the settings of the sources.
        on_progress: called with documents done and documents in all.

    Returns:
        How many documents were copied; those that the target had already are not counted.

    Raises:
        RetrieverError: a source holds no index, two were built with different settings or formats, or a folder cannot be used;
            nothing is copied then.

    """
    for source in sources:
        if not (source / INDEX_FILE).is_file():
            raise RetrieverError(f"{source} holds no index; name the folder that documents were ingested into")
    done = copied = 0
    with ExitStack() as opened:

        def open_one(folder: Path, settings: dict[str, str]) -> Catalog:
            catalog = Catalog(folder / INDEX_FILE, settings)
            opened.callback(catalog.close)
            return catalog

        settings: dict[str, str] = {}  # an index without documents has none
        given = []
        for source in sources:
            given.append(open_one(source, settings))
            settings = settings or given[-1].settings
        if not settings:
            return 0
        try:
            make_folder(target)
        except OSError as error:
            raise RetrieverError(f"cannot make {target}: {error.strerror}; choose another directory") from error
        into = open_one(target, settings)
        documents = [catalog.documents() for catalog in given]
        total = sum(map(len, documents))
        for catalog, own in zip(given, documents, strict=True):
            for document in own:
                if into.version(document.id) != document.version:
                    _, vectors_ND = catalog.vectors(document.id)
                    into.put(document, catalog.chunks(document.id), vectors_ND)
                    copied += 1
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
    return copied
