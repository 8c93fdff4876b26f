"""A request from its arrival to its answer: what is asked, its prefill, its tokens, and how long each stage took."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import check_whole
from cacheblend.blend import FusionConfig, FusionResult, SequenceKV
from cacheblend.loader import LoadingPlan
from cacheblend.retriever import Chunk, ScoredChunk

from .blend_plan import PlannedSegment
from .config import METHODS
from .decoding import Decoding, Piece, Sampling, TokenLogprob
from .passages import FoundPassage
from .prompt import PromptTokens

if TYPE_CHECKING:
    from .engine import Engine
    from .prefill import Prefill

# Of each report.
PLAN_FIELDS = ("method", "hits", "misses", "recompute_ratio", "reusable_tokens", "recomputed_tokens", "look_alike")
REASONS = "exact_reason", "no_chunks_reason"  # of a plan, if there are some


def namespace_of(cache_salt: str) -> str:
    """The namespace of a cache salt: its SHA-256 in hex, "" for none.

    A salt comes from outside and may be a client's secret: its hash is what disk, logs and messages have, and is of one length.
    """
    return hashlib.sha256(cache_salt.encode(errors="surrogatepass")).hexdigest() if cache_salt else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(Sampling):
    """What a question may ask for beside its words, sampling included; the options of `Engine.answer` and `Engine.prepare`.

    Args:
        num_chunks: chunks to retrieve, or as many as there are; the nearest one's document stands first, its chunks in its own
            order.
        filter: of the metadata of the documents that are searched, see `MetadataFilter.of`.
        method: one of `METHODS`; all run the very same token ids.
        documents: bring your own retriever: these are split and used in full, and nothing is searched. A `Chunk` of the
            engine's retriever is used as it is.
        recompute_ratio: for "blend", 0..1; None leaves it to the config, or else to the loading controller.
        max_loss_nats: for "blend", how far the first token may move before more is recomputed (`FusionConfig`); None leaves it
            to the config, unless there is a ratio.
        max_tokens: upper bound on the generated tokens; None for the config's, or else as many as fit after the prompt.
        earlier_question: the user's before this one, which a search considers too.
        layout: what stands around the chunks; None puts the config's instruction before and the question after them. With a
            layout, `num_chunks=0` retrieves nothing.
        passages: those in the texts of `layout`, see `Engine.find_passages`; their stored KV is reused where it is worth it.
        cache_salt: of stored KV only that of this salt is used.
        tenant: who asks; tenants of a scheduler take turns.
        arrived: `time.perf_counter` when it was asked, from which a deadline counts; now by default.
    """

    num_chunks: int = 6
    filter: Mapping[str, Any] | None = None
    method: str = "blend"
    documents: Sequence[Mapping[str, object] | Chunk] | None = None
    recompute_ratio: float | None = None
    max_loss_nats: float | None = None
    max_tokens: int | None = None
    earlier_question: str = ""
    layout: PromptTokens | None = None
    passages: Sequence[FoundPassage] = ()
    cache_salt: str = ""
    tenant: str = ""
    arrived: float = field(default_factory=time.perf_counter)

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> RequestOptions:
        """The options of a call.

        Raises:
            ConfigError: there is no such option or method, or a number is outside its range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(options.keys() - set(known)):
            raise ConfigError("option", unknown[0], f"a request has {', '.join(known)}")
        asked = cls(**options)
        if isinstance(asked.stop, str):
            asked = dataclasses.replace(asked, stop=(asked.stop,))
        if asked.method not in METHODS:
            raise ConfigError("method", asked.method, f"one of {', '.join(METHODS)}")
        if asked.max_tokens is not None:
            check_whole("max_tokens", asked.max_tokens)
        if asked.filter and asked.documents is not None:
            raise ConfigError("filter", asked.filter, "for a search; leave it out beside documents, which are all used")
        return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Record of a prompt's prefill; enough to replay it (`cacheblend.blend.ExplicitPositions(plan.recomputed)`).

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
        recomputed_tokens: reusable tokens that were recomputed, in the mean over layers 1 and up, rounded.
        loaded_bytes: bytes of stored KV that were loaded, by tier.
        loading: what the loading controller expected; None where it was not asked.
        moved_nats: how far the first token's distribution moved in a blend's first round (blend/widening.py); None where it was
            not measured.
        look_alike: chunks that were computed since they look alike (docs/adr/031); neither hits nor misses.
        exact_reason: why a hybrid's prompt was run exactly, whatever the method; None for other models.
        no_chunks_reason: why there are no chunks, where a search found none, or there is a filter; else None.
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
    recomputed_tokens: int
    loaded_bytes: Mapping[str, int]
    loading: LoadingPlan | None = None
    moved_nats: float | None = None
    look_alike: int = 0
    exact_reason: str | None = None
    no_chunks_reason: str | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV was there before."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.tier is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of each stage; TTFT is defined here.

    Args:
        retrieve_s: embedding the question and searching the index, or splitting the documents that were brought.
        ttft_s: question and chunks in hand -> first token id on the host: prompt, lookup, prefill and first token. Retrieval
            is not in it.
        decode_s: the tokens after the first.
        total_s: all, retrieval included.
    """

    retrieve_s: float
    ttft_s: float
    decode_s: float
    total_s: float


def chunk_origin(scored: ScoredChunk) -> dict[str, Any]:
    """Where a chunk of a prompt is from, for JSON; distance and score of one that was brought are None."""
    return {
        "document_id": scored.chunk.document_id,
        "title": scored.chunk.title,
        "position": scored.chunk.position,
        **scored.place.as_dict(),
        **({"metadata": dict(scored.metadata)} if scored.metadata else {}),
        "distance": None if math.isnan(scored.distance) else scored.distance,
        "score": None if math.isnan(scored.score) else scored.score,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer and how it came about.

    Args:
        text: the generated text, special tokens left out.
        thoughts: a reasoning model's, which are no part of the text.
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
    thoughts: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; token ids of segments and positions as counts."""
        plan = self.plan
        return {
            "text": self.text,
            "thoughts": self.thoughts,
            "token_ids": self.token_ids,
            "chunks": [
                {**chunk_origin(scored), "tokens": len(scored.chunk.token_ids), "text": scored.chunk.text}
                for scored in self.chunks
            ],
            "plan": {
                **{name: getattr(plan, name) for name in (*PLAN_FIELDS, "prompt_tokens", *REASONS)},
                "segments": [
                    {"kind": segment.kind, "tokens": len(segment.token_ids), "key": segment.key, "tier": segment.tier}
                    for segment in plan.segments
                ],
                "recomputed_per_layer": [len(positions) for positions in plan.recomputed],
                "loaded_bytes": dict(plan.loaded_bytes),
                "loading": None if plan.loading is None else dataclasses.asdict(plan.loading),
            },
            "timings": dataclasses.asdict(self.timings),
        }


@dataclass(frozen=True, slots=True)
class Done:
    """The request is answered.

    Args:
        answer: the answer; TTFT in its timings includes the time in the queue.
        finish_reason: "stop" (end of sequence or a stop string) or "length".
        stop_string: the stop string that ended the answer, if one did.
        last_text, last_thoughts: those that were held back until now.
        queue_s: seconds that the request waited before its prefill began.
        logprobs: of each token, if the request asked for them.
        deviation_N: each prompt token's KV deviation where it was measured (paper §4.1), 0 elsewhere.
    """

    answer: Answer
    finish_reason: str
    stop_string: str | None
    last_text: str
    last_thoughts: str
    queue_s: float
    logprobs: tuple[TokenLogprob, ...]
    deviation_N: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer."""

    error: Exception


Event = Piece | Done | Failed


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One question from its arrival to its answer: `Engine.prepare` makes it, prefill and decoding add what they know.

    Who serves it calls `begin`, `prefill_layer` until it has a `decoding`, `decode` until the answer is complete, `finish`, and
    in every case `end`. Only `cancel` may be called from another thread. Times are seconds of `time.perf_counter`.

    Args:
        engine: has its documents and stored KV.
        asked: what was asked for.
        method: how to prefill.
        fusion: for "blend"; a ratio of None leaves it to the loading controller.
        max_tokens: most tokens to generate.
        chunks: the chunks in the prompt, in order.
        prompt: the prompt's token ids.
        started: when `Engine.prepare` began.
        retrieved: when the chunks were there.
        no_chunks_reason: see `AnswerPlan`.
        leader: an earlier request of the same prompt: while it decodes, its prefill serves this one too.

    Attributes:
        deliver: called with every event, in order: the tokens, and at last `Done` or `Failed`; a cancelled request has neither.
            Must return at once.
        holds_kv: whether the prompt's KV outlives the answer.
        submitted, begun, ended: when it began to wait, when its prefill began, when the answer was complete.
        prefill: its result; None before, and when its KV was let go.
        decoding: its tokens so far; None before the first.
    """

    engine: Engine = field(repr=False)
    asked: RequestOptions
    method: str
    fusion: FusionConfig
    max_tokens: int
    chunks: list[ScoredChunk]
    prompt: PromptTokens
    started: float
    retrieved: float
    no_chunks_reason: str | None = None
    leader: Request | None = field(default=None, repr=False)

    deliver: Callable[[Event], None] = field(init=False, default=lambda _: None, repr=False)
    cancelled: bool = field(init=False, default=False)
    holds_kv: bool = field(init=False, default=False)
    submitted: float = field(init=False, default=0.0)
    begun: float = field(init=False, default=0.0)
    ended: float = field(init=False, default=0.0)
    prefill: Prefill | None = field(init=False, default=None, repr=False)
    decoding: Decoding | None = field(init=False, default=None, repr=False)
    _layers: Iterator[object] = field(init=False, default=iter(()), repr=False)
    _held: ExitStack = field(init=False, default_factory=ExitStack, repr=False)
    _followers: int = field(init=False, default=0)  # that wait for this one's prefill

    @property
    def tenant(self) -> str:
        """Who asks."""
        return self.asked.tenant

    @property
    def namespace(self) -> str:
        """Whose stored KV it may use, and whose the KV of its missing chunks becomes."""
        return namespace_of(self.asked.cache_salt)

    @property
    def fused(self) -> FusionResult:
        """The prompt's KV and first logits, once it is prefilled."""
        assert self.prefill is not None, "the request is not prefilled, or its KV was let go"
        return self.prefill.fused

    @property
    def kv(self) -> SequenceKV:
        """Its sequence's KV, while it decodes."""
        assert self.decoding is not None
        assert self.decoding.kv is not None
        return self.decoding.kv

    @property
    def last_token(self) -> int:
        """The token that the next step of decoding appends."""
        assert self.decoding is not None
        return self.decoding.token_ids[-1]

    def follow(self, index: int) -> Request:
        """Another choice of this request's prompt, whose seed is `index` more; see `leader`."""
        seed = self.asked.seed
        self._followers += 1
        return replace(self, asked=self.asked if seed is None else replace(self.asked, seed=seed + index), leader=self)

    def cancel(self) -> None:
        """Give the request up: its next step frees what it holds, and no more events come."""
        self.cancelled = True

    def begin(self) -> None:
        """Begin the prefill; a follower of a request that decodes has nothing to prefill."""
        self.begun = time.perf_counter()
        self._held.enter_context(self.engine.foreground)
        if self.leader is not None and self.leader.decoding is not None and self.leader.prefill is not None:
            self.method = self.leader.method
            self.prefill = replace(self.leader.prefill, prefix=None)
        else:
            self._layers = self._held.enter_context(closing(self.engine.prefill_steps(self)))

    def prefill_layer(self) -> bool:
        """Run the next layer; after the last layer draw the first token. True if the answer is complete with that."""
        for _ in self._layers:
            return False
        fused, leader = self.fused, self.leader
        self.decoding = decoding = Decoding(self.engine.fusor, fused, self.asked, self.max_tokens)
        if leader is not None:
            leader._followers -= 1
        is_complete = self._draw(fused.logits)
        if not is_complete:
            decoding.kv = self.engine.fusor.decoder.sequence(fused)
        owner = leader if leader and leader.prefill and leader.fused is fused else self  # of the prompt's KV
        if not owner.holds_kv and not owner._followers:  # only the sequences use the prompt's KV from now on
            fused.take_memory()
            fused.cache.layers.clear()
        return is_complete

    def decode(self, logits_V: torch.Tensor) -> bool:
        """Draw the next token, now that the last one has its KV. True if the answer is complete."""
        if self.prefill is not None and self.prefill.prefix is not None:
            self.prefill.prefix.append(self.last_token, self.kv, self.engine.fusor.decoder)
        return self._draw(logits_V)

    def _draw(self, logits_V: torch.Tensor) -> bool:
        assert self.decoding is not None
        self.deliver(self.decoding.draw(logits_V))
        return self.decoding.finish_reason is not None

    def finish(self) -> Done:
        """End the answer, and return it."""
        prefill, decoding = self.prefill, self.decoding
        assert prefill is not None
        assert decoding is not None
        assert decoding.finish_reason is not None
        if prefill.prefix is not None:
            prefill.prefix.commit_prompt()  # an answer of one token has appended none
        last_text, last_thoughts = decoding.finish()
        self.ended = time.perf_counter()
        return Done(
            answer=self._answer(prefill, decoding),
            finish_reason=decoding.finish_reason,
            stop_string=decoding.stop_string,
            last_text=last_text,
            last_thoughts=last_thoughts,
            queue_s=self.begun - (self.submitted or self.begun),
            logprobs=tuple(decoding.logprobs),
            deviation_N=prefill.fused.deviation,
        )

    def end(self) -> None:
        """Stop loading, release pins, and let go of the KV; of an answered request not of the prompt's while it `holds_kv`, or
        a follower waits for it.
        """
        self._held.close()
        if self.decoding is not None:
            self.decoding.kv = None
        elif self.leader is not None:  # that it follows no more
            self.leader._followers -= 1
        if self.leader is not None and self.leader.ended:
            self.leader.end()
        if not (self.ended and (self.holds_kv or self._followers)):
            self.release()

    def release(self) -> None:
        """Let go of the prompt's KV, unless a follower waits for it."""
        self.holds_kv = False
        if not (self.ended and self._followers):
            self.prefill = None

    def _answer(self, prefill: Prefill, decoding: Decoding) -> Answer:
        fused = prefill.fused
        looked_up = [segment for segment in prefill.segments if segment.key is not None]
        hits = sum(segment.tier is not None for segment in looked_up)
        plan = AnswerPlan(
            method=self.method,
            segments=prefill.segments,
            hits=hits,
            misses=len(looked_up) - hits,
            recompute_ratio=prefill.ratio,
            recomputed=fused.recomputed,
            prompt_tokens=len(fused.token_ids),
            reusable_tokens=fused.reusable_tokens,
            suffix_tokens=len(self.prompt.suffix),
            recomputed_tokens=round(fused.recomputed_ratio * fused.reusable_tokens),
            loaded_bytes=prefill.loaded_bytes,
            loading=prefill.loading,
            moved_nats=fused.moved_nats,
            look_alike=prefill.look_alike,
            exact_reason=self.engine.fusor.exact_reason,
            no_chunks_reason=self.no_chunks_reason,
        )
        timings = Timings(
            retrieve_s=self.retrieved - self.started,
            ttft_s=decoding.first_token - self.retrieved,
            decode_s=self.ended - decoding.first_token,
            total_s=self.ended - self.started,
        )
        return Answer(
            text=decoding.said,
            thoughts=decoding.thoughts,
            token_ids=decoding.token_ids,
            chunks=self.chunks,
            plan=plan,
            timings=timings,
            first_logits=fused.logits,
        )
