"""A request on its way: what is known before the model runs, and the answer made of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend.retriever import ScoredChunk

from .answer import Answer, AnswerPlan, Timings
from .prefiller import Prefilled
from .prompt import PromptPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that was checked, with its chunks and its prompt.

    Args:
        method: how to prefill.
        recompute_ratio: for "blend"; None leaves it to the loading controller.
        max_tokens: most tokens to generate.
        sampling: what `generate` is given beside that.
        chunks: the chunks in the prompt, in order.
        pieces: the prompt.
        started: seconds of `time.perf_counter`, when it was asked for.
        retrieved: the same, when the chunks were there.
    """

    method: str
    recompute_ratio: float | None
    max_tokens: int
    sampling: Mapping[str, Any]
    chunks: list[ScoredChunk]
    pieces: PromptPieces
    started: float
    retrieved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """When the stages of a request ended, in seconds of `time.perf_counter`."""

    prefill_done: float
    first_token: float
    ended: float


def assemble_answer(
    prepared: PreparedRequest, prefilled: Prefilled, token_ids: list[int], text: str, times: StageTimes
) -> Answer:
    """The answer, its plan and its timings."""
    loading = prefilled.loading
    timings = Timings(
        retrieve_s=prepared.retrieved - prepared.started,
        ttft_s=times.first_token - prepared.retrieved,
        lookup_s=prefilled.lookup_s,
        prefill_s=times.prefill_done - prepared.retrieved,
        load_s=prefilled.load_s,
        wait_s=prefilled.fused.wait_s,
        decode_s=times.ended - times.first_token,
        total_s=times.ended - prepared.started,
        predicted_prefill_s=None if loading is None else loading.prefill_s,
        predicted_load_s=None if loading is None else loading.load_s,
    )
    return Answer(
        text=text,
        token_ids=token_ids,
        chunks=prepared.chunks,
        plan=_plan(prepared, prefilled),
        timings=timings,
        first_logits=prefilled.fused.logits,
    )


def _plan(prepared: PreparedRequest, prefilled: Prefilled) -> AnswerPlan:
    fused = prefilled.fused
    looked_up = [segment for segment in prefilled.segments if segment.key is not None]
    hits = sum(segment.tier is not None for segment in looked_up)
    return AnswerPlan(
        method=prepared.method,
        segments=prefilled.segments,
        hits=hits,
        misses=len(looked_up) - hits,
        recompute_ratio=prefilled.recompute_ratio,
        recomputed=fused.recomputed,
        prompt_tokens=len(fused.token_ids),
        reusable_tokens=fused.reusable_tokens,
        tail_tokens=len(prepared.pieces.tail),
        recomputed_tokens=fused.recomputed_ratio * fused.reusable_tokens,
        loaded_bytes=prefilled.loaded_bytes,
        loading=prefilled.loading,
    )
