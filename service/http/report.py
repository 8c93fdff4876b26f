"""What a response tells beside the answer: tokens, where each chunk's KV came from, what was recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..serving import Done
from ..serving.text_stream import TextStream


def usage(done: Done) -> dict[str, Any]:
    """OpenAI's `usage`. `cached_tokens` are those whose KV was there before, `recomputed_tokens` how many of the reusable ones
    were recomputed, in the mean over layers 1 and up.
    """
    plan = done.answer.plan
    completion_tokens = len(done.answer.token_ids)
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": plan.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": plan.cached_tokens, "recomputed_tokens": round(plan.recomputed_tokens, 3)},
    }


def plan_report(done: Done) -> dict[str, Any]:
    """Method, hits, ratio and times of a request."""
    plan, timings = done.answer.plan, done.answer.timings
    return {
        "method": plan.method,
        "hits": plan.hits,
        "misses": plan.misses,
        "recompute_ratio": plan.recompute_ratio,
        "reusable_tokens": plan.reusable_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "loaded_bytes": dict(plan.loaded_bytes),
        "retrieve_s": timings.retrieve_s,
        "queue_s": done.queue_s,
        "ttft_s": timings.ttft_s,
        "total_s": timings.total_s,
    }


def chunk_report(done: Done, tokenizer: Any) -> list[dict[str, Any]]:
    """The chunks of a prompt, in order, with each token's text, KV deviation, and share of the layers that recomputed it."""
    plan, chunks = done.answer.plan, done.answer.chunks
    share_N = torch.zeros(plan.prompt_tokens)
    later = plan.recomputed[1:]
    for positions in later:
        share_N[positions] += 1 / len(later)
    start = plan.prompt_tokens - sum(len(scored.chunk.token_ids) for scored in chunks) - plan.suffix_tokens
    report = []
    for scored in chunks:
        chunk, stop = scored.chunk, start + len(scored.chunk.token_ids)
        source = _source(done, start)
        report.append(
            {
                "document_id": chunk.document_id,
                "title": chunk.title,
                "position": chunk.position,
                "distance": None if scored.distance != scored.distance else scored.distance,
                "source": source,
                "tokens": [
                    {"text": text, "deviation": round(deviation, 6), "recomputed": round(share, 4)}
                    for text, deviation, share in zip(
                        token_texts(chunk.token_ids, tokenizer),
                        done.deviation_N[start:stop].tolist(),
                        share_N[start:stop].tolist(),
                        strict=True,
                    )
                ],
            }
        )
        start = stop
    return report


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Each token's part of their text, the spaces between them included; a character of several tokens is the last one's."""
    stream = TextStream(tokenizer)
    texts = [stream.add(token) for token in token_ids]
    return [*texts[:-1], texts[-1] + stream.finish()]


def _source(done: Done, position: int) -> str:
    """Tier of the KV at a position: "ram", "nvme", "memory", or "computed" for what no KV was used of."""
    start = 0
    for segment in done.answer.plan.segments:
        start += len(segment.token_ids)
        if position < start:
            return segment.tier or "computed"
    return "computed"
