"""An example as the request that every method gets: the same token ids for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend.service.prompt import PromptPieces
from cacheblend.store.errors import PromptTooLongError

from .example import Example


@dataclass(frozen=True, slots=True)
class Request:
    """An example in token ids.

    Args:
        example: what it was made from.
        pieces: the prompt, cut to what the model can read.
        dropped_chunks: chunks that were left out for that.
        cut_tokens: tokens that went with them, and those cut from the last chunk left.
        is_warm_up: it only fills the cache.
    """

    example: Example
    pieces: PromptPieces
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
    is_warm_up: bool = False,
) -> Request:
    """The request of an example, cut where its prompt is longer than `limit` tokens.

    The rule: whole chunks are dropped from the middle of the context until the rest fits, as LongBench cuts; the last chunk
    left is cut at its end. Instruction and question are never cut.

    Raises:
        PromptTooLongError: instruction and question alone are longer than the limit.
    """
    kept, ids = [tuple(chunk) for chunk in chunks], list(document_ids)
    before = sum(map(len, kept))
    room = before if limit is None else limit - len(head) - len(tail)
    if room < 1:
        raise PromptTooLongError(
            f"case {example.id}: its instruction and question are {len(head) + len(tail)} tokens, and {limit} fit in the model "
            "beside the answer; use a model with more positions"
        )
    while len(kept) > 1 and sum(map(len, kept)) > room:
        del ids[len(kept) // 2 : len(kept) // 2 + 1], kept[len(kept) // 2]
    if sum(map(len, kept)) > room:
        kept = [kept[0][:room]]
    return Request(
        example,
        PromptPieces(tuple(head), tuple(kept), tuple(tail), tuple(ids)),
        dropped_chunks=len(chunks) - len(kept),
        cut_tokens=before - sum(map(len, kept)),
        is_warm_up=is_warm_up,
    )
