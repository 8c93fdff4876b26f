"""Merging of indexes: documents, chunks and vectors copied as they are, nothing split or embedded again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from cacheblend.base.errors import RetrieverError
from cacheblend.base.files import make_folder

from .catalog import Catalog

_FILE = "catalogue.sqlite"


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
        if not (source / _FILE).is_file():
            raise RetrieverError(f"{source} holds no index; name the folder that documents were ingested into")
    done = copied = 0
    with ExitStack() as opened:

        def open_one(folder: Path, settings: dict[str, str]) -> Catalog:
            catalog = Catalog(folder / _FILE, settings)
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
