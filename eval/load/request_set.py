"""A data set's requests as texts, as clients send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.eval.data import Request, RequestSource
from cacheblend.retriever import Embedder
from cacheblend.store.errors import InputError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A question over chunks.

    Args:
        id: the example's.
        question: in the data set's words.
        chunks: texts, in the prompt's order.
        is_warm_up: the source sets it apart to fill caches.
    """

    id: str
    question: str
    chunks: tuple[str, ...]
    is_warm_up: bool = False


def load_requests(
    source: RequestSource, tokenizer: Any, limit: int | None, embedder: Embedder | None = None
) -> list[LoadRequest]:
    """All requests of a source.

    Args:
        source: the data set.
        tokenizer: measures chunks and prompts; a peer's own may count a little differently.
        limit: longest prompt in tokens; None for no limit.
        embedder: in place of the retriever's own.
    """
    return [_texts(request, source, tokenizer) for request in source.requests(tokenizer, limit, embedder)]


def split_requests(
    requests: Sequence[LoadRequest], warm_up: int, rates: int, each: int
) -> tuple[list[LoadRequest], list[list[LoadRequest]]]:
    """Requests to warm up with, and those of every rate.

    Raises:
        InputError: there are too few.
    """
    apart = [request for request in requests if request.is_warm_up]
    measured = [request for request in requests if not request.is_warm_up]
    if not apart:
        apart, measured = measured[:warm_up], measured[warm_up:]
    if len(measured) < rates * each:
        raise InputError(
            f"the data set has {len(measured)} requests behind the {len(apart)} that warm up, and {rates} rates of {each} need "
            f"{rates * each}; lower --requests or give fewer rates"
        )
    return apart, [measured[rate * each : (rate + 1) * each] for rate in range(rates)]


def _texts(request: Request, source: RequestSource, tokenizer: Any) -> LoadRequest:
    def text(token_ids: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return decoded.strip()

    question = source.wording.question.format(question=request.example.question)
    chunks = tuple(filter(None, map(text, request.pieces.chunks)))
    return LoadRequest(request.example.id, question, chunks, request.is_warm_up)
