"""The retriever: documents in, the best chunks for a question out."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cacheblend.base.errors import InputError, RetrieverError
from cacheblend.base.files import make_folder
from cacheblend.base.options import is_whole
from cacheblend.base.threads import Progress, in_groups

from .catalog import Catalog
from .config import RetrieverConfig
from .document import Chunk, ChunkPlace, Document, EmbeddedDocument, ScoredChunk, chunk_places, found_texts, with_one_text
from .embedder import Embedder, SentenceTransformerEmbedder, checked_between_batches
from .index import INDEX_FILE, WORD, IndexedDocuments, SearchIndex, VectorIndex, fuse_rankings
from .metadata import MetadataFilter
from .splitter import Splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_CODE = re.compile(r"\A(?!(?:1\d|20)\d\d$).*\d")  # a word with digits that is no year
BATCH_CHUNKS = 128  # embedded and added together: enough that chunks of like length are neighbours
CANDIDATES = 50  # of each ranking that is fused
FIRST_ROUND_SHARE = 2 / 3  # of the chunks that the first round of two decides
EARLIER_CHARACTERS = 1000  # of the question before
PLACED_DOCUMENTS = 64  # whose chunks' places are remembered
# Of a title, and of headings, in front of each chunk: a quarter of a chunk's tokens, but so many at least and at most.
TITLE_TOKENS = (8, 64)


def in_reading_order(found: Sequence[ScoredChunk]) -> list[ScoredChunk]:
    """Chunks of one document together and in its order, for a later one may refer back; documents by their best chunk."""
    rank = {id_: place for place, id_ in enumerate(dict.fromkeys(scored.chunk.document_id for scored in found))}
    return sorted(found, key=lambda scored: (rank[scored.chunk.document_id], scored.chunk.position))


class Retriever(IndexedDocuments):
    """Splits, embeds and stores documents, and finds the best chunks for a question. Thread-safe; a context manager.

    In its directory, `catalogue.sqlite` is the source of truth. The indexes of vectors and words lie in memory: they are built
    from the catalog at the first question, and follow it at later ones.

    Args:
        config: how to split, which embedder, where to store.
        tokenizer: the model's own fast tokenizer.
        embedder: in place of the one that the config names.

    Raises:
        RetrieverError: the directory cannot be used, or its documents were added with other settings.
    """

    def __init__(
        self, config: RetrieverConfig, tokenizer: PreTrainedTokenizerBase | Tokenizer, embedder: Embedder | None = None
    ) -> None:
        self.config = config
        self.splitter = Splitter(tokenizer, config)
        self.embedder: Embedder = SentenceTransformerEmbedder(config.embedder) if embedder is None else embedder
        if config.directory is not None:
            try:
                make_folder(config.directory)
            except OSError as error:
                raise RetrieverError(f"cannot make {config.directory}: {error.strerror}; choose another directory") from error
        self._settings = {"tokenizer": self.splitter.fingerprint, "embedder": self.embedder.name}
        file = None if config.directory is None else config.directory / INDEX_FILE
        super().__init__(Catalog(file, {**self._settings, "chunk_tokens": str(config.chunk_tokens)}, config.index_budget_bytes))
        self._index = SearchIndex(self._catalog)
        self._places = functools.lru_cache(PLACED_DOCUMENTS)(self._places_of)

    def add(
        self, documents: Iterable[Document | Mapping[str, object]], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Chunk]:
        """Add documents, and return their chunks; of a known id the same text is skipped, and another replaces it.

        Every document is checked before the first is added. Each is added completely or not at all: after a crash the directory
        holds the first ones, and adding all of them again continues there.

        Args:
            documents: `{"id": str, "title": str, "text": str}`; id and title are optional.
            on_progress: called with the documents done and their total, first and after each.

        Raises:
            InputError: a document cannot be used, or two with one id have different texts.
            RetrieverError: the embedder or the directory cannot be used.
            StoreFullError: the disk is full.
        """
        checked = _checked(documents)
        changed, new = self.changed(checked), list[Chunk]()
        same, note = len(checked) - len(changed), on_progress or (lambda *_: None)
        note(same, len(checked))
        for done, embedded in enumerate(self.embed(changed), same + 1):
            self.put([embedded])
            new += embedded.chunks
            note(done, len(checked))
        return new

    def changed(self, documents: Iterable[Document | Mapping[str, object]]) -> list[Document]:
        """The documents that `add` would add, each once: those that are not here with this text.

        Raises:
            InputError: a document cannot be used, or two with one id have different texts.
        """
        wanted = {document.id: document for document in _checked(documents)}
        with self._lock:
            # A damaged document is replaced by what is given now, though it be the same.
            versions = {id_: self._catalog.version(id_) if self._catalog.is_intact(id_) else None for id_ in wanted}
        return [document for id_, document in wanted.items() if document.version != versions[id_]]

    def embed(self, documents: Iterable[Document], progress: Progress | None = None) -> Iterator[EmbeddedDocument]:
        """Split and embed documents, in groups; writes nothing, see `put`.

        Args:
            documents: in the order in which they come out.
            progress: follows the embedding of each group, and may end it.

        Raises:
            RetrieverError: the embedder cannot be used.
        """
        progress = progress or Progress()
        split = ((document, self.splitter.split(document, progress.check)) for document in documents)
        for batch in in_groups(split, lambda batch: sum(len(chunks) for _, chunks in batch) >= BATCH_CHUNKS):
            texts = [text for _, chunks in batch for text in self._embedded_texts(chunks)]
            with checked_between_batches(progress.check, progress.note_windows):
                progress.check()
                vectors_ND = self._embed(texts)
            for document, chunks in batch:
                yield EmbeddedDocument(document, chunks, vectors_ND[: len(chunks)])
                vectors_ND = vectors_ND[len(chunks) :]

    def rewrite_index(self, directory: Path, check: Callable[[str, Sequence[Sequence[int]]], None], progress: Progress) -> None:
        """Give the chunks of a directory this tokenizer's ids and, where its embedder is another, vectors, all or none.

        The texts stay as they are cut, so that a chunk may have more tokens than `chunk_tokens`.

        Args:
            directory: of an index.
            check: called with the id and all new token ids of each document; an error that it raises ends the work.
            progress: follows the work by documents, and may end it.

        Raises:
            RetrieverError: the directory or the embedder cannot be used.
        """
        with IndexedDocuments.open(directory) as index:
            is_same = {name: index.setting(name) == value for name, value in self._settings.items()}
            done, total = itertools.count(1), index.count()

            def rewritten(chunks: Sequence[Chunk], vectors_ND: NDArray[np.float32]) -> tuple[list[Chunk], NDArray[np.float32]]:
                progress.check()
                new = [replace(chunk, token_ids=self.splitter.token_ids(chunk.text)) for chunk in chunks]
                check(new[0].document_id, [chunk.token_ids for chunk in new])
                progress.note("index", next(done), total)
                return new, vectors_ND if is_same["embedder"] else self._embed(list(self._embedded_texts(new)))

            if not all(is_same.values()):
                index.rewrite(self._settings, rewritten)

    @property
    def chunk_count(self) -> int:
        """How many chunks there are to search."""
        with self._lock, self._catalog.snapshot():
            index = self._index.current()
            return 0 if index is None else len(index)

    def search(
        self, question: str, num_chunks: int, filter: Mapping[str, Any] | None = None, earlier_question: str = ""
    ) -> list[ScoredChunk]:
        """The `num_chunks` best chunks for a question, or as many as there are, best first; see `RetrieverConfig`.

        A question that follows up on an earlier one is searched for by itself and together with that, and the ranks are fused.
        `min_score` drops chunks below it, perhaps all. With a filter, see `MetadataFilter.of`, only chunks of documents whose
        metadata meet it are found, perhaps none.

        Raises:
            InputError: the question is empty, num_chunks below 1, there are no chunks at all, or the filter cannot be read.
            RetrieverError: the embedder or the directory cannot be used.
            DamagedDocumentError: a chunk that was found is not what was written.
        """
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"question={question!r} is empty; ask something")
        if not is_whole(num_chunks) or num_chunks < 1:
            raise InputError(f"num_chunks={num_chunks!r} is not allowed: ask for a whole number of chunks, at least 1")
        meets = MetadataFilter.of(filter or {})
        with self._lock, self._catalog.snapshot():
            self._searchable()
        earlier_question = earlier_question[:EARLIER_CHARACTERS].strip()
        texts = [question, f"{question}\n{earlier_question}"] if earlier_question else [question]
        vectors = [self._embed([text])[0] for text in texts]  # one by one: a question does not wait for a batch of others
        with self._lock, self._catalog.snapshot():
            index = self._searchable()  # again: others may have deleted chunks meanwhile
            if index.dimensions != len(vectors[0]):
                why = f"the embedder gives vectors of {len(vectors[0])} dimensions, the index has {index.dimensions}"
                raise RetrieverError(f"{why}; use the embedder it was built with, or another directory")
            among = None if meets is None else self._catalog.chunk_ids(meets)
            found = self._find(index, texts, vectors, num_chunks, among)
        placed = [replace(one, place=self._place(one.chunk), score=1 - one.distance / 2) for one in found]
        least = self.config.min_score
        return placed if least is None else [one for one in placed if one.score >= least]

    def why_none(self, filter: Mapping[str, Any] | None) -> str:
        """Why a search found nothing: fields of its filter that no document has, a filter that none meets, or `min_score`."""
        meets = MetadataFilter.of(filter or {})
        with self._lock, self._catalog.snapshot():
            if meets is None or self._catalog.chunk_ids(meets):
                return f"no chunk reached min_score={self.config.min_score}"
            unknown = sorted((filter or {}).keys() - self._catalog.metadata_fields())
        return f"no document has the filter's {', '.join(map(ascii, unknown))}" if unknown else "no document meets the filter"

    def _place(self, chunk: Chunk) -> ChunkPlace:
        with suppress(InputError, IndexError):  # changed, or damaged, since it was found
            return self._places(chunk.document_id, chunk.version, chunk.title)[chunk.position]
        return ChunkPlace()

    def _places_of(self, document_id: str, version: str, title: str) -> tuple[ChunkPlace, ...]:
        """The places of all chunks of a document; InputError, which is not remembered, if there is no such version now."""
        with self._lock:
            if not (texts := self._catalog.document_texts(document_id, version)):
                raise InputError(f"document {document_id!r} has another version")
        return tuple(chunk_places(document_id, title, texts))  # without the lock: a document may be long

    def close(self) -> None:
        """Close catalog and indexes; a second call does nothing."""
        with self._lock:
            super().close()
            self._index.words.close()

    def _embedded_texts(self, chunks: Sequence[Chunk]) -> Iterator[str]:
        """Texts to embed and to search for a document's chunks (`found_texts`).

        Only the beginning of a long title is used, so that embedding every chunk with it costs little.
        """
        at_least, at_most = TITLE_TOKENS
        tokens = max(at_least, min(at_most, self.config.chunk_tokens // 4))
        shorten = functools.cache(lambda text: self.splitter.beginning(text, tokens))
        return found_texts(chunks[0].document_id, chunks[0].title, [chunk.text for chunk in chunks], shorten)

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors_ND = np.asarray(self.embedder.encode(texts), dtype=np.float32)
        if vectors_ND.shape != (len(texts), self.embedder.dimensions) or not np.isfinite(vectors_ND).all():
            found = f"vectors of shape {vectors_ND.shape}, or some that are not finite"
            raise RetrieverError(f"embedder {self.embedder.name!r} gave {found}; use another embedder")
        return vectors_ND

    def _find(
        self,
        index: VectorIndex,
        texts: Sequence[str],
        vectors: Sequence[NDArray[np.float32]],
        num_chunks: int,
        among: Sequence[int] | None,
        candidates: int = CANDIDATES,
    ) -> list[ScoredChunk]:
        """The best chunks for texts, the question first, of those of the index ids `among` or of all."""
        size = len(index) if among is None else len(among)
        count, words, question = min(num_chunks, size), self._index.words, texts[0]
        if not count:
            return []
        # 1. Rank by meaning and by words, each list longer than what is wanted, and fuse the ranks.
        candidates = min(max(candidates, num_chunks), size)
        # Numbers and codes name a row among rows that have everything else in common with it.
        codes = " ".join(word for word in WORD.findall(question) if _CODE.match(word))
        by_words = (words.search(text, candidates, among) for text in (*texts, codes))
        best = fuse_rankings([*(index.search(vector_D, candidates, among) for vector_D in vectors), *by_words])
        # 2. The names in the best document's chunks lead to those that a question over two documents does not name.
        if self.config.search_rounds == 2 and 1 < count < len(best):
            first = best[: max(1, round(FIRST_ROUND_SHARE * count))]
            chunks = [self._catalog.chunk(id_) for id_ in first]
            said = [chunk.text for chunk in chunks if chunk.document_id == chunks[0].document_id]
            if names := [word for word in WORD.findall(" ".join([chunks[0].title, *said])) if word[0].isupper()]:
                second = words.search(" ".join([question, *names]), count + len(first), among)
                best = [*first, *[id_ for id_ in second if id_ not in first][: count - len(first)], *best[len(first) :]]
        # 3. The chunks themselves, of equal ones the best, and how near they are.
        found = dict[str, ScoredChunk]()
        for id_ in dict.fromkeys(best):
            if len(found) < count:
                chunk = self._catalog.chunk(id_)
                text = chunk.text.removeprefix(chunk.title).strip()
                metadata = self._catalog.metadata(chunk.document_id)
                distance = min(index.distance(id_, vector_D) for vector_D in vectors)
                found.setdefault(text, ScoredChunk(chunk, distance, metadata=metadata))
        if len(found) < count and candidates < min(size, 16 * CANDIDATES):  # equal texts have the places of others
            return self._find(index, texts, vectors, num_chunks, among, 4 * candidates)
        return list(found.values())

    def _searchable(self) -> VectorIndex:
        index = self._index.current()
        if index is None or len(index) == 0:
            raise InputError("there are no documents to search; ingest some first")  # no path: the service tells it to callers
        return index


def _checked(documents: Iterable[Document | Mapping[str, object]]) -> list[Document]:
    """The documents that were given; each id has one text."""
    if isinstance(documents, (str, bytes, Mapping, Document)) or not isinstance(documents, Iterable):
        raise InputError(f"documents must be a list of documents, got {type(documents).__name__}; put it in a list")
    return [*with_one_text(map(Document.of, documents))]
