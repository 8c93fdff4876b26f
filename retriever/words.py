"""Search by words: BM25 over the catalog's texts, and the fusion of its ranking with that of the vectors.

The table lies in memory: what is deleted leaves no word of it on the disk, and there is nothing that a crash could part from
the catalog. It is built at the first question (a second for 4 MB of text), and follows the catalog's changes after that.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from cacheblend.base.errors import RetrieverError

from .catalog import Catalog, Change
from .document import Chunk
from .places import found_texts

WORD = re.compile(r"\w+")
MAX_WORDS = 64  # that a search looks up, the rarest
COMMON = 0.2  # words that more than this share of the chunks have say little, and make a search slow
# Of reciprocal rank fusion, sum of 1 / (RRF_K + rank). The usual 60 lets what is tenth in both lists pass what is first in one:
# recall of 6 chunks on 2Wiki 0.766 for 0.786 (docs/benchmarks.md).
RRF_K = 10
KEPT = 2 / 3  # share of the chunks that the first round of two decides


class WordIndex:
    """The words of all chunks, kept in step with the catalog by its generation. Not thread-safe by itself.

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
        """Give the memory back; a second call does nothing."""
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
            change = self._catalog.changes(self._generation)
            with self._transaction():
                if change is None:
                    self._db.execute("DELETE FROM words")
                    self._add(self._catalog.texts())
                else:
                    self._remove(change.removed_ids)
                    self._add(self._catalog.texts(change.added_ids))
            self._generation = generation
        words = self._telling(dict.fromkeys(WORD.findall(text.lower())))
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        query = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?"
        return [id_ for (id_,) in self._db.execute(query, (match, limit))]

    def _telling(self, words: Iterable[str]) -> list[str]:
        """The rarest of some words, without those that are common where others are left."""
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
    """The words of a text that begin with a capital letter: what a second search goes on from."""
    return (word for word in WORD.findall(text) if word[0].isupper())
