"""A request from its arrival to its answer: how it is sampled, what it was prefilled from, how long each stage took."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionResult
from cacheblend.loader import LoadingPlan
from cacheblend.retriever import Chunk, ScoredChunk

from .blend_plan import PlannedSegment
from .config import UNSALTED
from .prefix_cache import CachedPrefix
from .prompt import PromptLayout, PromptTokens


def namespace_of(cache_salt: str) -> str:
    """The namespace of a cache salt: its SHA-256 in hex, "" for none.

    A salt comes from outside and may be a client's secret: its hash is what disk, logs and messages have, and is of one length.
    """
    return hashlib.sha256(cache_salt.encode()).hexdigest() if cache_salt else UNSALTED


LEAST_TEMPERATURE = 1e-5  # logits over less leave float32's range, and the likeliest token is drawn anyway


def sampling_options(temperature: float, top_p: float, top_k: int = 0) -> dict[str, Any]:
    """Options for `Fusor.generate`.

    Args:
        temperature: below `LEAST_TEMPERATURE` greedy; above, tokens are sampled.
        top_p: sample from the most likely tokens of this total probability.
        top_k: sample from so many most likely tokens; 0 or -1 for all.

    Raises:
        ConfigError: a number outside its range.
    """
    if not isinstance(temperature, int | float) or not math.isfinite(temperature) or temperature < 0:
        raise ConfigError("temperature", temperature, "0 (greedy) or above")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ConfigError("top_p", top_p, "above 0, at most 1")
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < -1:
        raise ConfigError("top_k", top_k, "a whole number of at least 1, or 0 or -1 for all tokens")
    if temperature < LEAST_TEMPERATURE:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": max(0, top_k)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a question may ask for beside its words; the options of `Engine.answer` and `Engine.prepare`.

    Args:
        num_chunks: chunks to retrieve, or as many as there are; the nearest one's document stands first, its chunks in its own
            order.
        method: "blend", "full_recompute", "prefix_cache" or "full_reuse"; all run the very same token ids.
        documents: bring your own retriever: these are split and used in full, and nothing is searched. A `Chunk` of the
            engine's retriever is used as it is.
        recompute_ratio: for "blend", 0..1; None leaves it to the config, or else to the loading controller.
        max_tokens: upper bound on the generated tokens; None for the config's, or else as many as fit after the prompt.
        temperature: 0 is greedy; above, tokens are sampled.
        top_p: sample from the most likely tokens of this total probability.
        top_k: sample from so many most likely tokens; 0 for all.
        layout: what stands around the chunks; None puts the config's instruction before and the question after them. With a
            layout, `num_chunks=0` retrieves nothing.
        cache_salt: of stored KV only that of this salt is used.
    """

    num_chunks: int = 6
    method: str = "blend"
    documents: Sequence[Mapping[str, object] | Chunk] | None = None
    recompute_ratio: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    layout: PromptLayout | None = None
    cache_salt: str = ""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> RequestOptions:
        """The options of a call.

        Raises:
            ConfigError: there is no such option.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise ConfigError("option", unknown[0], f"a request has {', '.join(known)}")
        return cls(**options)


class FirstTokenClock(BaseStreamer):
    """A streamer that notes the time of the first generated token; `generate` puts the prompt before it.

    Args:
        on_token: called with each generated token.
    """

    def __init__(self, on_token: Callable[[int], None] | None = None) -> None:
        self._puts, self._on_token = 0, on_token
        self.first_token = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.first_token = time.perf_counter()
        if self._puts > 1 and self._on_token is not None:
            self._on_token(int(value))

    def end(self) -> None:
        """Called by `generate` at the end; nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Record of a prompt's prefill; enough to replay it (`cacheblend.blend.ExplicitPositions(plan.recomputed)`), but for
    "blended" segments, whose KV is an earlier request's.

    Args:
        method: the method that was asked for.
        segments: the prompt's segments, in order.
        hits: chunks whose stored KV was used; with "prefix_cache" 1 where a prefix was found.
        misses: chunks whose KV was not stored. They are recomputed in the prompt ("fresh"), and their KV is computed
            and stored afterwards, in the background.
        recompute_ratio: the ratio that was asked of the fusor; None where it had no say.
        recomputed: per layer, sorted LongTensor of the positions that went through attention and MLP.
        prompt_tokens: N.
        reusable_tokens: tokens that the ratio counts.
        suffix_tokens: tokens after the chunks.
        recomputed_tokens: how many of those were recomputed, in the mean over layers 1 and up.
        loaded_bytes: bytes of stored KV that were loaded, by tier.
        loading: what the loading controller expected; None where it was not asked.
    """

    method: str
    segments: tuple[PlannedSegment, ...]
    hits: int
    misses: int
    recompute_ratio: float | None
    recomputed: tuple[torch.Tensor, ...] = field(repr=False)
    prompt_tokens: int
    reusable_tokens: int
    suffix_tokens: int
    recomputed_tokens: float
    loaded_bytes: Mapping[str, int]
    loading: LoadingPlan | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV was there before."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.tier is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of each stage. TTFT is defined here alone.

    Args:
        retrieve_s: embedding the question and searching the index; 0 where documents were brought.
        ttft_s: question and chunks in hand -> first token id on the host: prompt, lookup, prefill and first token. Retrieval
            is not in it.
        lookup_s: the store's lookup and the plan.
        prefill_s: everything up to the first logits; `wait_s` is in it.
        load_s: reading stored KV and putting it in place: files in threads beside the prefill, what is in a CPU's RAM in it.
        wait_s: the part of the prefill in which the fusor waited for stored KV, or copied it: what of `load_s` was not hidden.
        decode_s: the tokens after the first.
        total_s: all, retrieval included.
        predicted_prefill_s: what the loading controller expected of the prefill, lookup apart; None where it was not asked.
        predicted_load_s: what it expected of `load_s`.
    """

    retrieve_s: float
    ttft_s: float
    lookup_s: float
    prefill_s: float
    load_s: float
    wait_s: float
    decode_s: float
    total_s: float
    predicted_prefill_s: float | None = None
    predicted_load_s: float | None = None


def chunk_origin(scored: ScoredChunk) -> dict[str, Any]:
    """Where a chunk of a prompt is from, for JSON; distance and score of one that was brought are None."""
    return {
        "document_id": scored.chunk.document_id,
        "title": scored.chunk.title,
        "position": scored.chunk.position,
        **scored.place.as_dict(),
        "distance": None if math.isnan(scored.distance) else scored.distance,
        "score": None if math.isnan(scored.score) else scored.score,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and how it came about.

    Args:
        text: the generated text, special tokens left out.
        token_ids: the generated token ids.
        chunks: the chunks in the prompt, in order; distance is NaN where documents were brought.
        plan: how the prompt was prefilled.
        timings: seconds of each stage.
        first_logits: float32 (V,), those that the first token was drawn from.
    """

    text: str
    token_ids: list[int]
    chunks: list[ScoredChunk]
    plan: AnswerPlan
    timings: Timings
    first_logits: torch.Tensor = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; token ids of segments and positions as counts."""
        plan = self.plan
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "chunks": [
                {**chunk_origin(scored), "tokens": len(scored.chunk.token_ids), "text": scored.chunk.text}
                for scored in self.chunks
            ],
            "plan": {
                "method": plan.method,
                "segments": [
                    {"kind": segment.kind, "tokens": len(segment.token_ids), "key": segment.key, "tier": segment.tier}
                    for segment in plan.segments
                ],
                "hits": plan.hits,
                "misses": plan.misses,
                "recompute_ratio": plan.recompute_ratio,
                "recomputed_per_layer": [len(positions) for positions in plan.recomputed],
                "prompt_tokens": plan.prompt_tokens,
                "reusable_tokens": plan.reusable_tokens,
                "recomputed_tokens": plan.recomputed_tokens,
                "loaded_bytes": dict(plan.loaded_bytes),
                "loading": None if plan.loading is None else dataclasses.asdict(plan.loading),
            },
            "timings": dataclasses.asdict(self.timings),
        }


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A question on its way to its answer: `Engine.prepare` makes it, prefill and decoding add what they know.

    Times are seconds of `time.perf_counter`. `dataclasses.replace` gives the same question anew, not prefilled.

    Args:
        method: how to prefill.
        recompute_ratio: for "blend"; None leaves it to the loading controller.
        max_tokens: most tokens to generate.
        sampling: what `Fusor.generate` is given beside that.
        namespace: whose KV it may use, and whose the KV of its missing chunks becomes; see `namespace_of`.
        chunks: the chunks in the prompt, in order.
        prompt: the prompt's token ids.
        started: when it was asked for.
        retrieved: when the chunks were there.

    Attributes:
        segments, loading, lookup_s, load_s, loaded_bytes: see `AnswerPlan` and `Timings`.
        fused_ratio: the ratio that was asked of the fusor; None where it had no say.
        prefix: keeps the prompt's blocks for later prompts; None where nothing does.
        prefilled, first_token, ended: when the prefill ended, when the first and the last token were on the host.
        token_ids, text: what was generated.
    """

    method: str
    recompute_ratio: float | None
    max_tokens: int
    sampling: Mapping[str, Any]
    namespace: str
    chunks: list[ScoredChunk]
    prompt: PromptTokens
    started: float
    retrieved: float

    segments: tuple[PlannedSegment, ...] = field(init=False, default=())
    fused_ratio: float | None = field(init=False, default=None)
    loading: LoadingPlan | None = field(init=False, default=None)
    lookup_s: float = field(init=False, default=0.0)
    load_s: float = field(init=False, default=0.0)
    loaded_bytes: Mapping[str, int] = field(init=False, default_factory=dict)
    prefix: CachedPrefix | None = field(init=False, default=None)
    prefilled: float = field(init=False, default=0.0)
    first_token: float = field(init=False, default=0.0)
    ended: float = field(init=False, default=0.0)
    token_ids: list[int] = field(init=False, default_factory=list)
    text: str = field(init=False, default="")
    _fused: FusionResult | None = field(init=False, default=None, repr=False)

    @property
    def fused(self) -> FusionResult:
        """The prompt's KV and first logits, once it is prefilled."""
        assert self._fused is not None, "the request is not prefilled, or was released"
        return self._fused

    def finish_prefill(self, fused: FusionResult, segments: Sequence[PlannedSegment]) -> None:
        """Note the prefill's result."""
        self._fused, self.segments, self.prefilled = fused, tuple(segments), time.perf_counter()

    def release(self) -> None:
        """Let go of the prompt's KV."""
        self._fused = self.prefix = None

    def answer(self) -> Answer:
        """The answer, its plan and its timings, once the last token is there."""
        fused, loading = self.fused, self.loading
        looked_up = [segment for segment in self.segments if segment.key is not None]
        hits = sum(segment.tier is not None for segment in looked_up)
        plan = AnswerPlan(
            method=self.method,
            segments=self.segments,
            hits=hits,
            misses=len(looked_up) - hits,
            recompute_ratio=self.fused_ratio,
            recomputed=fused.recomputed,
            prompt_tokens=len(fused.token_ids),
            reusable_tokens=fused.reusable_tokens,
            suffix_tokens=len(self.prompt.suffix),
            recomputed_tokens=fused.recomputed_ratio * fused.reusable_tokens,
            loaded_bytes=self.loaded_bytes,
            loading=loading,
        )
        timings = Timings(
            retrieve_s=self.retrieved - self.started,
            ttft_s=self.first_token - self.retrieved,
            lookup_s=self.lookup_s,
            prefill_s=self.prefilled - self.retrieved,
            load_s=self.load_s,
            wait_s=fused.wait_s,
            decode_s=self.ended - self.first_token,
            total_s=self.ended - self.started,
            predicted_prefill_s=None if loading is None else loading.prefill_s,
            predicted_load_s=None if loading is None else loading.load_s,
        )
        return Answer(
            text=self.text,
            token_ids=self.token_ids,
            chunks=self.chunks,
            plan=plan,
            timings=timings,
            first_logits=fused.logits,
        )
