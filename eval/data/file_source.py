"""A data set's file as requests: split, searched, cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.retriever import (
    Chunk,
    Document,
    Embedder,
    PlainTokenizer,
    Retriever,
    RetrieverConfig,
    SentenceTransformerEmbedder,
)

from .case_file import read_examples
from .data_set import DataSet, data_set, find_file
from .example import Example
from .preset import SEARCHED_TOP_K, Preset
from .remembering_embedder import RememberingEmbedder
from .request import Request, arrange, make_request
from .source import prompt_builder
from .wording import Wording


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Cases of a data set's file.

    Args:
        name: of the data set.
        data: see `find_file`.
        cases: how many, from the file's start; None for as many as the paper took.
        seed: of the order, where the preset shuffles.
        preset: chunks, retrieval, order, prompt and caching.

    Raises:
        ConfigError: an unknown data set, or fewer than one case.
    """

    name: str
    data: str | None = None
    cases: int | None = None
    seed: int = 0
    preset: Preset = field(default_factory=Preset)

    def __post_init__(self) -> None:
        if self.cases is not None and self.cases < 1:
            raise ConfigError("cases", self.cases, "at least 1")
        if self.preset.shared_corpus and not self._set.searched:
            raise ConfigError("preset", "extended", f"{self.name} is not searched, so its cases share no corpus; use paper")

    @property
    def _set(self) -> DataSet:
        return data_set(self.name)

    @property
    def wording(self) -> Wording:
        """The words around passages and questions."""
        return replace(self._set.wording, prompt=self.preset.prompt)

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return self._set.new_tokens

    @property
    def count(self) -> int:
        """At most so many requests; the file may hold fewer."""
        return self.cases or self._set.cases

    @property
    def caches_all(self) -> bool:
        """Whether each chunk of a request is cached before it comes."""
        return not self.preset.shared_corpus

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """See `RequestSource.requests`; the whole file is read before the first request.

        Raises:
            InputError: the file is not there, or a line of it is no example.
        """
        limits = [tokens for tokens in (limit, self._set.prompt_tokens) if tokens is not None]
        path = find_file(self.name, self.data)
        examples = list(itertools.islice(read_examples(path), self.count))  # a broken line ends the run here, not hours later
        warm_up = int(self.preset.warm_up * len(examples))
        builder, plain = prompt_builder(tokenizer, self.wording), PlainTokenizer(tokenizer)
        config = RetrieverConfig(chunk_tokens=self.preset.chunk_tokens)
        with Retriever(config, tokenizer, embedder or RememberingEmbedder(SentenceTransformerEmbedder())) as retriever:
            if self.preset.shared_corpus:
                random.Random(self.seed).shuffle(examples)
                retriever.add((document for example in examples for document in _documents(example)), on_corpus)
            for index, example in enumerate(examples):
                question = self.wording.question.format(question=example.question)
                chunks = self._chunks(example, retriever, plain)
                request = make_request(
                    example,
                    builder.head,
                    [chunk.token_ids for chunk in chunks],
                    builder.build([], question).tail,
                    min(limits, default=None),
                    document_ids=[chunk.document_id for chunk in chunks],
                    documents=[chunk.earlier for chunk in chunks],
                    is_warm_up=index < warm_up,
                )
                yield arrange(request, self.preset.order, tokenizer.decode)

    def _chunks(self, example: Example, retriever: Retriever, plain: PlainTokenizer) -> list[_Chunk]:
        """A case's chunks, in the prompt's order."""
        documents, top_k = _documents(example), self.preset.top_k
        if (self.preset.chunking or ("split" if self._set.split else "passage")) == "passage":
            separator = retriever.config.separator
            return [_Chunk(document.id, plain.ids(document.content + separator)) for document in documents[:top_k]]
        if not self._set.searched:
            split = ((document.id, retriever.splitter.split(document)) for document in documents)
            every = (_Chunk.of(chunk, chunks) for _, chunks in split for chunk in chunks)
            return list(itertools.islice(every, top_k))
        if not self.preset.shared_corpus:
            retriever.add(documents)
        found = retriever.search(example.question, min(top_k or SEARCHED_TOP_K, retriever.chunk_count))
        chunks = [_Chunk.of(scored.chunk, retriever.chunks(scored.chunk.document_id)) for scored in found]
        if not self.preset.shared_corpus:
            for document in retriever.documents():
                retriever.delete(document.id)
        return chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk's document and token ids, and those of the document's chunks before it."""

    document_id: str
    token_ids: Sequence[int]
    earlier: Sequence[Sequence[int]] = ()

    @classmethod
    def of(cls, chunk: Chunk, document: Sequence[Chunk]) -> _Chunk:
        """A chunk of a document, given all of the document's."""
        earlier = [other.token_ids for other in document if other.position < chunk.position]
        return cls(chunk.document_id, chunk.token_ids, earlier)


def _documents(example: Example) -> list[Document]:
    return [Document.of({"title": passage.title, "text": passage.text}) for passage in example.passages]
