"""A data set's requests as texts, as clients send them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.eval.data import Example, Request, RequestSource
from cacheblend.retriever import Embedder


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A question over documents.

    Args:
        example: with the right answers.
        question: in the data set's words.
        documents: texts, in the prompt's order; chunks of one document are one text, since what is in front of a chunk in its
            document tells which of its tokens must be recomputed.
        chunk_tokens: of the longest chunk.
        is_warm_up: the source sets it apart to fill caches.
    """

    example: Example
    question: str
    documents: tuple[str, ...]
    chunk_tokens: int
    is_warm_up: bool = False


def load_requests(
    source: RequestSource,
    tokenizer: Any,
    limit: int | None,
    embedder: Embedder | None = None,
    on_corpus: Callable[[int, int], None] | None = None,
) -> Iterator[LoadRequest]:
    """The requests of a source, made as they are asked for.

    Args:
        source: the data set.
        tokenizer: measures chunks and prompts; a peer's own may count a little differently.
        limit: longest prompt in tokens; None for no limit.
        embedder: in place of the retriever's own.
        on_corpus: see `RequestSource.requests`.
    """
    for request in source.requests(tokenizer, limit, embedder, on_corpus):
        yield _texts(request, source, tokenizer)


def split_requests(
    requests: Iterable[LoadRequest], warm_up: int, rates: int, each: int
) -> tuple[list[LoadRequest], list[list[LoadRequest]]]:
    """Requests to warm up with, and those of every rate; no more are taken than that.

    Raises:
        InputError: there are too few.
    """
    coming = iter(requests)
    apart: list[LoadRequest] = []
    measured: list[LoadRequest] = []
    for request in coming:
        (apart if request.is_warm_up else measured).append(request)
        if measured:
            break
    needed = rates * each if apart else warm_up + rates * each
    measured += itertools.islice(coming, needed - len(measured))
    if not apart:
        apart, measured = measured[:warm_up], measured[warm_up:]
    if len(measured) < rates * each:
        raise InputError(
            f"the data set has {len(measured)} requests behind the {len(apart)} that warm up, and {rates} rates of {each} need "
            f"{rates * each}; lower --requests or give fewer rates"
        )
    return apart, [measured[rate * each : (rate + 1) * each] for rate in range(rates)]


def _texts(request: Request, source: RequestSource, tokenizer: Any) -> LoadRequest:
    pieces, documents = request.pieces, dict[str, str]()
    for index, chunk in enumerate(pieces.chunks):
        document = pieces.document_ids[index] if pieces.document_ids else str(index)
        documents[document] = documents.get(document, "") + tokenizer.decode(chunk, clean_up_tokenization_spaces=False)
    return LoadRequest(
        request.example,
        source.wording.question.format(question=request.example.question),
        tuple(filter(None, map(str.strip, documents.values()))),
        max(map(len, pieces.chunks), default=1),
        request.is_warm_up,
    )
