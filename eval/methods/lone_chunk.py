"""One chunk read alone, as MapReduce and MapRerank do (paper §7.1, after LangChain)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from cacheblend.blend import Fusor, Segment

from .method import generate, rows_run
from .resident import ResidentRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnswer:
    """What the model says behind the head, one chunk and a tail.

    Args:
        token_ids: greedy.
        confidence: mean log-probability of them.
        recomputed_tokens: see `MethodAnswer`.
        loaded_bytes: see `MethodAnswer`.
    """

    token_ids: list[int]
    confidence: float
    recomputed_tokens: float
    loaded_bytes: int


def read_chunk(fusor: Fusor, resident: ResidentRequest, index: int, tail: tuple[int, ...], max_new_tokens: int) -> ChunkAnswer:
    """Continue head, chunk and tail. Head and chunk are a prefix that prefix caching holds, where the chunk is cached."""
    prefix, kv = (*resident.pieces.head, *resident.pieces.chunks[index]), resident.lone_kv[index]
    if fusor.max_positions is not None and len(prefix) + len(tail) + max_new_tokens > fusor.max_positions:
        prefix, kv = prefix[: fusor.max_positions - len(tail) - max_new_tokens], None
    fused = fusor.prefill((*prefix, *tail)) if kv is None else fusor.fuse([Segment(prefix, kv, exact=True), Segment(tail)])
    confidence = _Confidence()
    processors: Any = LogitsProcessorList([confidence])
    token_ids, _ = generate(fusor, fused, max_new_tokens, logits_processor=processors)
    return ChunkAnswer(
        token_ids=token_ids,
        confidence=sum(confidence.logprobs) / len(confidence.logprobs),
        recomputed_tokens=rows_run(fused),
        loaded_bytes=0 if kv is None else kv.nbytes,
    )


class _Confidence(LogitsProcessor):
    """Notes the log-probability of the likeliest token of each step, which greedy decoding takes."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.logprobs.append(float(torch.log_softmax(scores[0].float(), dim=-1).max()))
        return scores
