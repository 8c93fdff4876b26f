"""Indexes of the catalog's vectors and words, in memory, and the fusion of their rankings.

Shapes: N vectors, D dimensions, K results.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import faiss
import numpy as np
from numpy.typing import NDArray

from cacheblend.base.errors import RetrieverError

from .catalog import Catalog, Change
from .document import Chunk, found_texts

WORD = re.compile(r"\w+")
MAX_WORDS = 64  # that a search looks up, the rarest
COMMON = 0.2  # words that more than this share of the chunks have say little, and make a search slow
# Of reciprocal rank fusion, sum of 1 / (RRF_K + rank). The usual 60 lets what is tenth in both lists pass what is first in one:
# recall of 6 chunks on 2Wiki 0.766 for 0.786 (docs/benchmarks.md).
RRF_K = 10


class VectorIndex:
    """An exact L2 index whose vectors can be added and removed one by one.

    It is flat, not approximate: a scan of 100,000 chunks needs milliseconds, a prefill of six of them seconds.
    """

    def __init__(self, dimensions: int) -> None:
        self._index: faiss.Index = faiss.IndexIDMap2(faiss.IndexFlatL2(dimensions))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return int(self._index.d)

    def add(self, ids: Sequence[int], vectors_ND: NDArray[np.float32]) -> None:
        """Add vectors under new ids."""
        self._index.add_with_ids(np.ascontiguousarray(vectors_ND, dtype=np.float32), np.asarray(ids, dtype=np.int64))

    def remove(self, ids: Sequence[int]) -> None:
        """Remove the vectors of these ids; the order of the others stays."""
        self._index.remove_ids(faiss.IDSelectorBatch(np.asarray(ids, dtype=np.int64)))

    def search(self, vector_D: NDArray[np.float32], top_k: int) -> tuple[list[int], list[float]]:
        """Ids and squared L2 distances of the K nearest vectors, nearest first, the lower id first among equals."""
        distances_1K, ids_1K = self._index.search(np.ascontiguousarray(vector_D, dtype=np.float32)[None], top_k)
        found = sorted(zip(distances_1K[0].tolist(), ids_1K[0].tolist(), strict=True))
        return [id_ for _, id_ in found], [distance for distance, _ in found]

    def distance(self, id_: int, vector_D: NDArray[np.float32]) -> float:
        """Squared L2 distance of the vector of an id; NaN if there is none."""
        try:
            return float(np.square(self._index.reconstruct(id_) - vector_D).sum())
        except RuntimeError:
            return math.nan


class SyncedIndex:
    """The index of a catalog's vectors, in memory, synchronised by the catalog's generation. Not thread-safe by itself.

    It is built from the catalog at the first question, and again if another process has changed the catalog.

    Args:
        catalog: the source of truth.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index: VectorIndex | None = None  # None before the first document
        self._generation = -1  # of the catalog that the index shows; -1 is nothing yet

    def current(self) -> VectorIndex | None:
        """The index of the catalog's present vectors; call it in a snapshot. None before the first document.

        Raises:
            RetrieverError: the catalog cannot be read.

        """
        generation, dimensions = self._catalog.generation, self._catalog.dimensions
        if generation != self._generation:
            self._index, self._generation = None, -1  # should this fail half-way, the index is built anew
            if dimensions is not None:
                ids, vectors_ND = self._catalog.vectors()
                self._index = VectorIndex(dimensions)
                if ids:
                    self._index.add(ids, vectors_ND)
            self._generation = generation
        return self._index

    def apply(self, change: Change, vectors_ND: NDArray[np.float32]) -> None:
        """Follow a change of the catalog; an index that was out of date already stays so until `current` builds it anew."""
        if change.generation != self._generation + 1:
            return
        self._generation = -1  # should this fail half-way, the index is built anew
        if self._index is not None:
            self._index.remove(change.removed_ids)
        if change.added_ids:
            if self._index is None or len(self._index) == 0:  # an emptied catalog may go on with other dimensions
                self._index = VectorIndex(vectors_ND.shape[1])
            self._index.add(change.added_ids, vectors_ND)
        self._generation = change.generation


class WordIndex:
    """The words of all chunks, searched by BM25, synchronised by the catalog's generation. Not thread-safe by itself.

    The table is in memory: a deleted document leaves no word on the disk, and a crash cannot separate it from the catalog. It
    is built at the first question (a second for 4 MB of text), and follows the catalog's changes later.

    Args:
        catalog: the source of truth.

    Raises:
        RetrieverError: Python's SQLite was built without FTS5.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._generation = catalog, -1
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("CREATE VIRTUAL TABLE words USING fts5(text, tokenize='unicode61 remove_diacritics 2')")
            self._db.execute("CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, row)")
        except sqlite3.OperationalError as error:
            self._db.close()
            raise RetrieverError(f"this Python's SQLite has no search by words ({error}); use retrieval='dense'") from error

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        self._db.close()

    def apply(self, change: Change, chunks: Sequence[Chunk]) -> None:
        """Follow a change of the catalog; an index that was out of date stays so until the next search."""
        if change.generation != self._generation + 1:
            return
        self._generation = -1  # should this fail half-way, the index is built anew
        with self._transaction():
            self._remove(change.removed_ids)
            self._add(
                (id_, chunk.document_id, chunk.title, chunk.text) for id_, chunk in zip(change.added_ids, chunks, strict=True)
            )
        self._generation = change.generation

    def search(self, text: str, limit: int) -> list[int]:
        """Index ids of the chunks that share words with a text, best first by BM25, the lower id among equals."""
        if self._generation != (generation := self._catalog.generation):
            with self._transaction():
                self._db.execute("DELETE FROM words")
                self._add(self._catalog.texts())
            self._generation = generation
        words = self._telling(dict.fromkeys(WORD.findall(text.lower())))
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?"
        return [id_ for (id_,) in self._db.execute(query, (match, limit))]

    def _telling(self, words: Iterable[str]) -> list[str]:
        """The rarest of some words, without common ones unless all are common."""
        [[chunks]] = self._db.execute("SELECT count(*) FROM words")
        counts = {word: self._db.execute("SELECT doc FROM vocabulary WHERE term = ?", (word,)).fetchone() for word in words}
        found = sorted(words, key=lambda word: counts[word][0] if counts[word] else 0)
        rare = [word for word in found if not counts[word] or counts[word][0] <= COMMON * chunks]
        return (rare or found)[:MAX_WORDS]

    def _remove(self, ids: Iterable[int]) -> None:
        self._db.executemany("DELETE FROM words WHERE rowid = ?", ((id_,) for id_ in ids))

    def _add(self, rows: Iterable[tuple[int, str, str, str]]) -> None:
        """Index ids with their document's id and title, and their text, each document's in order."""
        for (document_id, title), group in groupby(rows, key=itemgetter(1, 2)):
            of_document = list(group)
            texts = [text for *_, text in of_document]
            printable = (
                (id_, found.encode(errors="replace").decode())
                for (id_, *_), found in zip(of_document, found_texts(document_id, title, texts), strict=True)
            )
            self._db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", printable)

    def _transaction(self) -> sqlite3.Connection:
        self._db.execute("BEGIN")
        return self._db  # as a context manager it commits or rolls back


def fuse_rankings(rankings: Iterable[Sequence[int]]) -> list[int]:
    """One ranking of several, by reciprocal rank fusion; the lower id first among equals."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for place, id_ in enumerate(ranking, start=1):
            scores[id_] += 1 / (RRF_K + place)
    return sorted(scores, key=lambda id_: (-scores[id_], id_))


def names(text: str) -> Iterator[str]:
    """The words of a text that begin with a capital letter: the input of a second search."""
    return (word for word in WORD.findall(text) if word[0].isupper())
