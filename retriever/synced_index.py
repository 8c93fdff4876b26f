"""An index that follows the catalogue, and its copy on disk.

Shapes: N vectors, D dimensions.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cacheblend.base.errors import RetrieverError, StoreFullError

from .catalogue import Catalogue, Change
from .index import VectorIndex

_log = logging.getLogger(__name__)


class SyncedIndex:
    """The index of what a catalogue holds, kept in step by its generation.

    It is read from its file, or built from the catalogue's vectors where the file is missing, damaged or older, and again when
    another process has changed the catalogue. Not thread-safe by itself.

    Args:
        catalogue: the truth.
        path: the index's file; None keeps it in memory.

    """

    def __init__(self, catalogue: Catalogue, path: Path | None) -> None:
        self._catalogue = catalogue
        self._path = path
        self._index: VectorIndex | None = None  # None before the first document
        self._generation = -1  # of the catalogue that the index shows; -1 is nothing yet
        self._file_generation = -1  # the same of the file

    def current(self) -> VectorIndex | None:
        """The index of what the catalogue holds now; None where there has never been a document.

        Raises:
            RetrieverError: the catalogue cannot be read.

        """
        generation, dimensions = self._catalogue.generation, self._catalogue.dimensions
        if generation != self._generation:
            self._index = None if dimensions is None else self._read(generation, dimensions)
            self._generation = generation
        return self._index

    def apply(self, change: Change, vectors_ND: NDArray[np.float32]) -> None:
        """Follow a change of the catalogue; an index that was behind already stays so until `current` builds it anew."""
        if change.generation != self._generation + 1:
            return
        self._generation = -1  # should this fail half-way, the index is built anew
        if self._index is not None:
            self._index.remove(change.removed_ids)
        if change.added_ids:
            if self._index is None or len(self._index) == 0:  # an emptied catalogue may go on with other dimensions
                self._index = VectorIndex(vectors_ND.shape[1])
            self._index.add(change.added_ids, vectors_ND)
        self._generation = change.generation

    def rebuild(self) -> None:
        """Build the index from the catalogue, whatever its file holds."""
        self._file_generation = -1
        self._index = None if self._catalogue.dimensions is None else self._build(self._catalogue.dimensions)

    def save(self) -> None:
        """Write the file, unless it shows the catalogue's generation already.

        Where writing fails, a warning is logged: nothing is lost, the next opening builds the index from the catalogue.
        """
        try:
            if self._path is None or (index := self.current()) is None or self._generation == self._file_generation:
                return
            index.save(self._path, self._generation)
            self._file_generation = self._generation
        except (OSError, RetrieverError, StoreFullError) as error:
            _log.warning("could not write %s: %s", self._path, error)

    def _read(self, generation: int, dimensions: int) -> VectorIndex:
        if self._path is not None and self._path.exists():
            try:
                index, self._file_generation = VectorIndex.load(self._path)
                if self._file_generation == generation and index.dimensions == dimensions:
                    return index
            except RetrieverError as error:
                _log.warning("%s; building the index from the catalogue", error)
        return self._build(dimensions)

    def _build(self, dimensions: int) -> VectorIndex:
        ids, vectors_ND = self._catalogue.vectors()
        index = VectorIndex(dimensions)
        if ids:
            index.add(ids, vectors_ND)
        return index
