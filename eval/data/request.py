"""An example as the request that every method gets: the same token ids for all."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cacheblend.base.errors import PromptTooLongError
from cacheblend.service.engine.prompt import PromptChunk, PromptTokens


class Task(StrEnum):
    """Kind of answer that an example asks for; it decides the metric: F1 and EM, or Rouge-L."""

    QA = "qa"
    SUMMARIZATION = "summarization"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that the answer may rest on; the title may be empty."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A plain example, the same for every data set.

    Args:
        id: unique in its data set.
        question: may be empty where the task alone says what to do.
        answers: the right answers; the best match counts. None where nobody knows: then there is no quality to report.
        passages: the context; none where the source searches documents of its own.
        task: what is asked for.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    task: Task


@dataclass(frozen=True, slots=True)
class Request:
    """An example in token ids.

    Args:
        example: what it was made from.
        prompt: the prompt, cut to what the model can read.
        dropped_chunks: chunks that were left out for that.
        cut_tokens: tokens that went with them, and those cut from the last chunk left.
        is_warm_up: it only fills the cache.
    """

    example: Example
    prompt: PromptTokens
    dropped_chunks: int = 0
    cut_tokens: int = 0
    is_warm_up: bool = False


def make_request(
    example: Example,
    head: Sequence[int],
    chunks: Sequence[Sequence[int]],
    tail: Sequence[int],
    limit: int | None,
    *,
    document_ids: Sequence[str] = (),
    documents: Sequence[Sequence[Sequence[int]]] = (),
    is_warm_up: bool = False,
) -> Request:
    """The request of an example, cut where its prompt is longer than `limit` tokens.

    The rule: whole chunks are dropped from the middle of the context until the rest fits, as LongBench cuts; the last chunk
    left is cut at its end. Instruction and question are never cut.

    Args:
        example: what it is made from.
        head: token ids before the chunks.
        chunks: token ids of each.
        tail: token ids after them.
        limit: most tokens of the prompt; None for no limit.
        document_ids: which document each chunk is of.
        documents: for each chunk the chunks of its document that come before it, in the document's order.
        is_warm_up: see `Request`.

    Raises:
        PromptTooLongError: instruction and question alone are longer than the limit.
    """
    kept = [
        PromptChunk(tuple(chunk), document=(id_, "") if document_ids else None, earlier=tuple(map(tuple, earlier)))
        for chunk, id_, earlier in zip(chunks, document_ids or [""] * len(chunks), documents or [()] * len(chunks), strict=True)
    ]
    before = _count(kept)
    room = before if limit is None else limit - len(head) - len(tail)
    if room < 1:
        raise PromptTooLongError(
            f"case {example.id}: its instruction and question are {len(head) + len(tail)} tokens, and {limit} fit in the model "
            "beside the answer; use a model with more positions"
        )
    while len(kept) > 1 and _count(kept) > room:
        del kept[len(kept) // 2]
    if _count(kept) > room:
        kept = [replace(kept[0], token_ids=kept[0].token_ids[:room])]
    return Request(
        example,
        PromptTokens(tuple(head), tuple(tail), tuple(kept)),
        dropped_chunks=len(chunks) - len(kept),
        cut_tokens=before - _count(kept),
        is_warm_up=is_warm_up,
    )


def arrange(request: Request, order: str, text_of: Callable[[Sequence[int]], str]) -> Request:
    """The request with its chunks in one of `ORDERS`; which chunks they are was settled before, so it is the same in all.

    Args:
        request: in the order of retrieval.
        order: see `Preset`. Where no chunk holds an answer as whole words, "gold-middle" leaves the order as it is.
        text_of: decodes a chunk.
    """
    places = list(range(len(request.prompt.chunks)))
    if order == "reversed":
        places.reverse()
    elif order == "gold-middle":
        texts = [text_of(ids) for ids in request.prompt.chunk_ids]
        gold = next((place for place in places if _tells(texts[place], request.example.answers)), None)
        if gold is not None:
            places.remove(gold)
            places.insert(len(texts) // 2, gold)
    chunks = tuple(request.prompt.chunks[place] for place in places)
    return replace(request, prompt=replace(request.prompt, chunks=chunks))


def _count(chunks: Sequence[PromptChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def _tells(text: str, answers: Sequence[str]) -> bool:
    words = (answer.strip() for answer in answers)
    return any(word and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in words)
