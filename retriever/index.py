"""An index's documents, and the indexes in memory of their vectors and words, whose rankings are fused.

Shapes: N vectors, D dimensions, K results.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from unicodedata import category, normalize

import faiss
import numpy as np
from numpy.typing import NDArray

from cacheblend.base.errors import RetrieverError
from cacheblend.base.files import Closing

from .catalog import Catalog
from .document import Chunk, ChunkPlace, chunk_places, found_texts
from .passages import Passage, StoredTexts, find_passages

INDEX_FILE = "catalogue.sqlite"
# Marks on letters, such as their vowels; those after them choose pictures.
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0xFE00)) if category(mark) in ("Mn", "Mc"))
WORD = re.compile(rf"[\w{_MARKS}]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
# Of scripts that put no spaces between words, or hardly any: Thai, Burmese, Khmer, Japanese, Chinese, Korean.
_RUN = re.compile(
    "[\u0e01-\u0edf\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]+"
)
TOKENIZER = "unicode61 remove_diacritics 2 categories 'L* N* Co Mn Mc'"
MAX_WORDS = 64  # that a search looks up, the rarest
COMMON = 0.2  # words that more than this share of the chunks have say little, and make a search slow
# Of reciprocal rank fusion, sum of 1 / (RRF_K + rank). The usual 60 lets what is tenth in both lists pass what is first in one:
# recall of 6 chunks on 2Wiki 0.766 for 0.786 (docs/benchmarks.md).
RRF_K = 10
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


class IndexedDocuments(Closing):
    """The documents of an index, without a tokenizer or an embedder. Thread-safe; a context manager, which closes the catalog.

    A retriever that has the same index open follows what is removed.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.RLock()  # over the catalog, and over the indexes in memory that follow it
        self._texts, self._generation = StoredTexts(self._chunk), 0  # of the catalog that the texts show

    @classmethod
    def open(cls, directory: Path) -> IndexedDocuments:
        """The documents of an index's folder (`RetrieverConfig.directory`).

        Raises:
            RetrieverError: there is no index, or it cannot be used.
        """
        if not (directory / INDEX_FILE).is_file():
            raise RetrieverError(f"{directory} holds no index; name the folder that documents were ingested into")
        return IndexedDocuments(Catalog(directory / INDEX_FILE, {}))

    count = _locked(Catalog.count)
    setting = _locked(Catalog.setting)
    rewrite = _locked(Catalog.rewrite)
    documents = _locked(Catalog.documents)
    document = _locked(Catalog.document)
    version = _locked(Catalog.version)
    ids = _locked(Catalog.ids)
    chunks = _locked(Catalog.chunks)
    is_intact = _locked(Catalog.is_intact)
    metadata = _locked(Catalog.metadata)
    verify = _locked(Catalog.verify)
    check_room = _locked(Catalog.check_room)
    put = _locked(Catalog.put)
    delete = _locked(Catalog.delete)

    def places(self, chunks: Sequence[Chunk]) -> list[ChunkPlace]:
        """The place of each of all the chunks of a document, in order."""
        texts = [chunk.text for chunk in chunks]
        return list(chunk_places(chunks[0].document_id, chunks[0].title, texts)) if chunks else []

    def passages(self, text: str, role: str) -> list[Passage]:
        """The passages in a message of a chat, stored chunks among them; see `find_passages`.

        Raises:
            RetrieverError: the catalog cannot be read.
        """
        with self._lock, self._catalog.snapshot():
            if self._generation != (generation := self._catalog.generation):
                self._texts.retain(self._catalog.chunk_ids())
                self._texts.add((id_, title, words) for id_, _, title, words in self._catalog.texts(self._texts.last))
                self._generation = generation
            return find_passages(text, role, self._texts)

    def _chunk(self, id_: int) -> Chunk | None:
        with suppress(RetrieverError):  # damaged since its text was noted
            return self._catalog.chunk(id_)
        return None

    def erase(self) -> None:
        """Clear the catalog's file of what was removed; searches do not wait for it. Raises as `Catalog.erase`."""
        self._catalog.erase()

    def close(self) -> None:
        """Close the catalog; a second call does nothing."""
        with self._lock:
            self._catalog.close()


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

    def remove(self, ids: Collection[int]) -> None:
        """Remove the vectors of these ids; the order of the others stays."""
        self._index.remove_ids(faiss.IDSelectorBatch(np.array([*ids], dtype=np.int64)))

    def search(self, vector_D: NDArray[np.float32], top_k: int, among: Sequence[int] | None = None) -> list[int]:
        """Ids of the K nearest vectors, of `among` or of all, nearest first, the lower id first among equals."""
        options = None
        if among is not None:
            options = faiss.SearchParameters()
            options.sel = faiss.IDSelectorBatch(np.asarray(among, dtype=np.int64))
        distances_1K, ids_1K = self._index.search(np.ascontiguousarray(vector_D, dtype=np.float32)[None], top_k, params=options)
        return [id_ for _, id_ in sorted(zip(distances_1K[0].tolist(), ids_1K[0].tolist(), strict=True)) if id_ >= 0]

    def distance(self, id_: int, vector_D: NDArray[np.float32]) -> float:
        """Squared L2 distance of the vector of an id; NaN if there is none."""
        try:
            return float(np.square(self._index.reconstruct(id_) - vector_D).sum())
        except RuntimeError:
            return math.nan


class WordIndex:
    """The words of all chunks, searched by BM25. In memory: a deleted document leaves no word on the disk."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.execute(f'CREATE VIRTUAL TABLE words USING fts5(text, tokenize="{TOKENIZER}")')
        self._db.execute("CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, row)")

    def close(self) -> None:
        """Free the memory; a second call does nothing."""
        self._db.close()

    def update(self, removed: Iterable[int], added: Iterable[tuple[int, str, str, str]]) -> None:
        """Remove the words of some chunks, and add others'.

        Args:
            removed: index ids.
            added: index id, document's id and title, and text of chunks, each document's in order.
        """
        self._db.execute("BEGIN")
        with self._db:  # commits or rolls back
            self._db.executemany("DELETE FROM words WHERE rowid = ?", ((id_,) for id_ in removed))
            for (document_id, title), group in groupby(added, key=itemgetter(1, 2)):
                of_document = list(group)
                texts = found_texts(document_id, title, [text for *_, text in of_document])
                printable = (in_words(found.encode(errors="replace").decode()) for found in texts)
                rows = zip((id_ for id_, *_ in of_document), printable, strict=True)
                self._db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)

    def search(self, text: str, limit: int, among: Sequence[int] | None = None) -> list[int]:
        """Index ids of the chunks, of `among` or of all, that share words with a text, best first by BM25, then by id."""
        words = self._telling(dict.fromkeys(WORD.findall(in_words(text.lower()))))
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        chosen = "" if among is None else "AND rowid IN (SELECT value FROM json_each(:among))"
        query = f"SELECT rowid FROM words WHERE words MATCH :match {chosen} ORDER BY rank, rowid LIMIT :limit"
        values = {"match": match, "limit": limit, "among": None if among is None else json.dumps(among)}
        return [id_ for (id_,) in self._db.execute(query, values)]

    def _telling(self, words: Iterable[str]) -> list[str]:
        """The rarest of some words, without common ones unless all that the chunks have are common."""
        [[chunks]] = self._db.execute("SELECT count(*) FROM words")
        query = "SELECT max(doc) FROM vocabulary WHERE term IN (?, ?)"  # where some scripts' letters have lost their accents
        spelled = {word: (word, _ACCENTS.sub("", normalize("NFD", word))) for word in words}
        counts = {word: self._db.execute(query, both).fetchone()[0] or 0 for word, both in spelled.items()}
        found = sorted(counts, key=lambda word: counts[word] or chunks)  # of none: FTS5 may spell it in a third way
        rare = [word for word in found if counts[word] <= COMMON * chunks]
        return (rare if any(map(counts.get, rare)) else found)[:MAX_WORDS]


class SearchIndex:
    """The indexes of a catalog's vectors and words, in memory, synchronised by its generation. Not thread-safe by itself.

    The first question reads all of the catalog (a second for 4 MB of text), a later one what has changed since.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._generation = -1  # of the catalog that the indexes show; -1 is nothing yet
        self._shown: set[int] = set()  # index ids of its chunks
        self._vectors: VectorIndex | None = None  # None before the first document
        self.words = WordIndex()

    def current(self) -> VectorIndex | None:
        """Bring both up to date, in a snapshot of the catalog; returns that of vectors, None before the first document.

        Raises:
            RetrieverError: the catalog cannot be read.
        """
        if self._generation != (generation := self._catalog.generation):
            dimensions = self._catalog.dimensions
            ids = set(self._catalog.chunk_ids())
            gone = self._shown - ids
            last = max(self._shown, default=0)  # no id is used twice: new ones are beyond it
            vectors = self._catalog.vectors(last)
            self.words.update(gone, self._catalog.texts(last))  # all or nothing, and after it nothing fails
            if dimensions is not None:
                if self._vectors is None or self._vectors.dimensions != dimensions:
                    self._vectors = VectorIndex(dimensions)
                self._vectors.remove(gone)
                self._vectors.add(*vectors)
            self._shown, self._generation = ids, generation
        return self._vectors


def in_words(text: str) -> str:
    """A text in which runs of scripts without spaces are pairs of characters that overlap, which search by words finds."""
    return _RUN.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0]))) or run[0]} ", text)


def fuse_rankings(rankings: Iterable[Sequence[int]]) -> list[int]:
    """One ranking of several, by reciprocal rank fusion; the lower id first among equals."""
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for place, id_ in enumerate(ranking, start=1):
            scores[id_] += 1 / (RRF_K + place)
    return sorted(scores, key=lambda id_: (-scores[id_], id_))
