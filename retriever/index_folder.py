"""An index without the model's tokenizer or an embedder: opened, its documents listed, checked and removed; indexes merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cacheblend.base.errors import RetrieverError
from cacheblend.base.extras import needs_extra
from cacheblend.base.files import make_folder

from .document import places_of
from .sqlite_catalog import SqliteCatalog

if TYPE_CHECKING:
    from .catalog import Catalog, IndexReport
    from .catalog_rows import CatalogedDocument
    from .document import Chunk, ChunkPlace

INDEX_FILE = "catalogue.sqlite"


def open_catalog(directory: Path | None, settings: Mapping[str, str], index: str | None = None, schema: str = "") -> Catalog:
    """The catalog of a folder, or of the server that holds it in its place; made when missing.

    Args:
        directory: its folder; None keeps it in memory.
        settings: what its chunks and vectors depend on.
        index: the server's URL, see `RetrieverConfig.index`.
        schema: of it, see `RetrieverConfig.index_schema`.

    Raises:
        RetrieverError: it cannot be used.
        MissingExtraError: the server's client is not installed.

    """
    if index is None:
        return SqliteCatalog(None if directory is None else directory / INDEX_FILE, settings)
    with needs_extra("postgres"):
        from .postgres_catalog import PostgresCatalog
    return PostgresCatalog(index, schema, settings)


class IndexedDocuments:
    """Lists and removes documents as `Retriever` does; a context manager. A retriever that is open follows what is removed.

    Args:
        directory: the index's folder (`RetrieverConfig.directory`).
        index: the server that holds it in its place, see `RetrieverConfig.index`.
        schema: of it, see `RetrieverConfig.index_schema`.

    Raises:
        RetrieverError: there is no index, or it cannot be used.

    """

    def __init__(self, directory: Path, index: str | None = None, schema: str = "") -> None:
        if index is None and not (directory / INDEX_FILE).is_file():
            raise RetrieverError(f"{directory} holds no index; name the folder that documents were ingested into")
        self._catalog = open_catalog(directory, {}, index, schema)

    def documents(
        self, limit: int | None = None, after: str | None = None, *, newest_first: bool = False
    ) -> list[CatalogedDocument]:
        """Documents in the order of adding, or in the reverse: at most `limit`, and those that follow the document `after`.

        Raises:
            InputError: there is no document `after`.

        """
        return self._catalog.documents(limit, after, newest_first=newest_first)

    def document(self, document_id: str) -> CatalogedDocument | None:
        """One document; None where there is no such document."""
        return self._catalog.document(document_id)

    def version(self, document_id: str) -> str | None:
        """The version of a document; None where there is no such document."""
        return self._catalog.version(document_id)

    def ids(self, prefix: str = "") -> list[str]:
        """The ids of documents, or of those whose id begins with a text, in the order of adding."""
        return self._catalog.ids(prefix)

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


def merge_indexes(
    sources: Sequence[Path],
    target: Path,
    *,
    index: str | None = None,
    schema: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Add the documents of indexes to one, in this order; one of a known id and another text takes that one's place.

    Each document is copied whole or not at all, so that the same call goes on where it was cut off. A retriever that has the
    target open follows.

    Args:
        sources: the indexes' folders (`RetrieverConfig.directory`).
        target: the folder of the index to add to, made when missing, with the settings of the sources.
        index: the server that holds the target in place of the folder, see `RetrieverConfig.index`.
        schema: of it, see `RetrieverConfig.index_schema`.
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
        settings: dict[str, str] = {}  # an index without documents has none
        given: list[Catalog] = []
        for source in sources:
            given.append(opened.enter_context(closing(open_catalog(source, settings))))
            settings = settings or given[-1].settings
        if not settings:
            return 0
        try:
            make_folder(target)
        except OSError as error:
            raise RetrieverError(f"cannot make {target}: {error.strerror}; choose another directory") from error
        into = opened.enter_context(closing(open_catalog(target, settings, index, schema)))
        documents = [catalog.documents() for catalog in given]
        total = sum(map(len, documents))
        for catalog, own in zip(given, documents, strict=True):
            for document in own:
                if into.version(document.id) != document.version:
                    into.put([(document, catalog.chunks(document.id), catalog.document_vectors(document.id))])
                    copied += 1
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
    return copied
