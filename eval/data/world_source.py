"""The fictional world as requests: its chunks as they are written, gold among look-alikes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cacheblend.base.errors import ConfigError
from cacheblend.eval.world import CaseConfig, make_cases
from cacheblend.retriever import Embedder, PlainTokenizer

from .request import Example, Passage, Request, Task, make_request
from .source import WORLD, Wording, prompt_renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSource:
    """Cases of a seed from the test split; see `cacheblend.eval.world`.

    Args:
        seed: draws names, facts, wordings and questions.
        cases: how many; the four classes in turn.
        articles: articles of a context, of two chunks each.
        chunk_tokens: least tokens of a chunk.

    Raises:
        ConfigError: a value is not allowed.
    """

    seed: int = 0
    cases: int = 200
    articles: int = CaseConfig().articles
    chunk_tokens: int = CaseConfig().chunk_tokens

    def __post_init__(self) -> None:
        if self.cases < 1:
            raise ConfigError("cases", self.cases, "at least 1")
        if self.chunk_tokens < 1:
            raise ConfigError("chunk_tokens", self.chunk_tokens, "at least 1")
        self._config()

    @property
    def name(self) -> str:
        """Name of the data set."""
        return "world"

    @property
    def wording(self) -> Wording:
        """The words around a question."""
        return WORLD

    @property
    def new_tokens(self) -> int:
        """Most tokens of an answer."""
        return 16

    @property
    def count(self) -> int:
        """So many requests."""
        return self.cases

    @property
    def caches_all(self) -> bool:
        """Each chunk was met before."""
        return True

    def requests(
        self,
        tokenizer: Any,
        limit: int | None,
        embedder: Embedder | None = None,
        on_corpus: Callable[[int, int], None] | None = None,
    ) -> Iterator[Request]:
        """See `RequestSource.requests`."""
        renderer, plain = prompt_renderer(tokenizer, self.wording), PlainTokenizer(tokenizer)
        for index, case in enumerate(make_cases(self.seed, self.cases, config=self._config())):
            example = Example(
                id=f"{self.seed}-{index}",
                question=case.question,
                answers=case.answers,
                passages=tuple(Passage("", chunk.text) for chunk in case.chunks),
                task=Task.QA,
                category=str(case.question_class),
            )
            chunks = [plain.ids(chunk.text) for chunk in case.chunks]
            tail, ids = renderer.question(case.question).suffix, [chunk.document for chunk in case.chunks]
            placed = list(zip(chunks, case.chunks, strict=True))
            documents = [
                [own for own, other in placed if other.document == chunk.document and other.index < chunk.index]
                for chunk in case.chunks
            ]
            yield make_request(example, renderer.prefix, chunks, tail, limit, document_ids=ids, documents=documents)

    def _config(self) -> CaseConfig:
        return CaseConfig(articles=self.articles, chunk_tokens=self.chunk_tokens)
