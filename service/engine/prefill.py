"""The four ways to prefill the same token ids (paper figure 1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from cacheblend.base.errors import ConfigError, DamagedEntryError
from cacheblend.blend import ChunkContext, FusedPrompt, Fusor, LayerReport, LayerSource, ResidentLayers, Segment, SegmentKV
from cacheblend.loader import LayerLoader, LoadingController, LoadingPlan
from cacheblend.retriever import ScoredChunk
from cacheblend.store import ChunkKey, ChunkKV, KVStore, Placement, context_digest

from .background_precompute import BackgroundPrecompute
from .config import EngineConfig
from .prefix_cache import PrefixCache, PromptPrefix
from .prompt import PromptPieces
from .request import Answer, AnswerPlan, PlannedSegment, Timings

_Step = TypeVar("_Step")
_Done = TypeVar("_Done")


class AwayClock:
    """Counts the seconds between the steps of a prefill, in which others ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, steps: Generator[_Step, None, _Done]) -> Generator[_Step, None, _Done]:
        """The same steps."""
        with closing(steps):
            while True:
                try:
                    report = next(steps)
                except StopIteration as done:
                    result: _Done = done.value
                    return result
                left = time.perf_counter()
                yield report
                self.seconds += time.perf_counter() - left


class Ends(NamedTuple):
    """A prompt but for its chunks: its exact beginning, and what is left of head and tail."""

    exact: list[Segment]
    planned: list[PlannedSegment]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    exact_tokens: int


def planned_segments(
    pieces: PromptPieces, keys: Sequence[ChunkKey], kvs: Sequence[SegmentKV | None], ends: Ends | None
) -> tuple[PlannedSegment, ...]:
    """The prompt's segments, given each chunk's KV; without `ends` what is stored was not used: neither a hit nor a miss."""
    segments = list(as_fresh(pieces.head) if ends is None else (*ends.planned, *as_fresh(ends.head)))
    for index, (chunk, key, kv) in enumerate(zip(pieces.chunks, keys, kvs, strict=True)):
        earlier = pieces.earlier_of(index)
        if kv is None:
            segments.append(PlannedSegment(kind="fresh", token_ids=chunk, key=str(key), earlier=earlier))
        elif ends is not None:
            tier = kv.tier if isinstance(kv, Placement) else None
            segments.append(PlannedSegment(kind="reused", token_ids=chunk, key=str(key), tier=tier, earlier=earlier))
        else:
            segments += as_fresh(chunk)
    return (*segments, *as_fresh(pieces.tail if ends is None else ends.tail))


def as_fresh(*pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    """Pieces that are recomputed whole."""
    return tuple(PlannedSegment(kind="fresh", token_ids=token_ids) for token_ids in pieces if token_ids)


def as_exact(prefix: PromptPrefix) -> list[Segment]:
    """The run that was found, as the fusor takes it."""
    return [] if prefix.run is None else [Segment(prefix.run.token_ids, prefix.run, exact=True)]


def behind(tokens: int, *pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    """What is fresh of the pieces behind their first `tokens` tokens."""
    rest: list[tuple[int, ...]] = []
    for piece in pieces:
        rest.append(piece[tokens:])
        tokens = max(0, tokens - len(piece))
    return as_fresh(*rest)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt's cache and first logits, how it was prefilled, and what keeps its blocks for later prompts (None: nothing)."""

    fused: FusedPrompt
    segments: tuple[PlannedSegment, ...]
    lookup_s: float = 0.0
    load_s: float = 0.0
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    recompute_ratio: float | None = None
    loading: LoadingPlan | None = None
    prefix: PromptPrefix | None = None


PrefillSteps = Generator[LayerReport | None, None, Prefilled]


class Prefiller:
    """Prefills prompts by the method asked for; safe to use from several threads.

    Args:
        fusor: the model.
        store: where chunks' KV is.
        prefixes: blocks of what was served before.
        background: computes what was missing, behind the requests.
        config: selector and loader settings.
        controller: picks the ratio where the caller does not; may be replaced. Without one, for want of a profile, it is r*.
        head: token ids that every prompt begins with, and that chunks are computed after; their KV is computed once and held.
        context: what stands between head and chunk when a chunk's KV is computed.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        prefixes: PrefixCache,
        background: BackgroundPrecompute,
        config: EngineConfig,
        controller: LoadingController | None,
        head: Sequence[int],
        context: ChunkContext,
    ) -> None:
        self._fusor, self._store, self._prefixes, self._background, self._config = fusor, store, prefixes, background, config
        self.controller = controller
        self._head, self._context = tuple(head), context
        self._head_kv: ChunkKV | None = fusor.precompute(head) if head else None
        self._methods: dict[str, Callable[[PromptPieces, float | None, str], PrefillSteps]] = {
            "full_recompute": self._full_recompute,
            "prefix_cache": self._prefix_cache,
            "full_reuse": lambda pieces, _, namespace: self._blend(pieces, 0.0, namespace),
            "blend": self._blend,
        }

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def key(self, token_ids: Sequence[int], earlier: Sequence[Sequence[int]], namespace: str = "") -> ChunkKey:
        """The store's key of a chunk that is computed after these chunks of its document."""
        context = context_digest(self._context.filler_ids, earlier)
        model, codec = self._fusor.fingerprint, self._config.codec
        return ChunkKey.of(token_ids, prefix_ids=self._head, context=context, model=model, codec=codec, namespace=namespace)

    def check_method(self, method: str) -> None:
        """Refuse an unknown method.

        Raises:
            ConfigError: so.
        """
        if not isinstance(method, str) or method not in self._methods:
            raise ConfigError("method", method, f"one of {', '.join(self._methods)}")

    def run(self, pieces: PromptPieces, method: str, recompute_ratio: float | None) -> Prefilled:
        """Prefill a prompt.

        Args:
            pieces: the prompt.
            method: one of `methods`.
            recompute_ratio: for "blend"; None leaves it to the controller.

        Raises:
            ConfigError: an unknown method, or a ratio outside 0..1.
        """
        self.check_method(method)
        if method == "full_recompute":  # the model's own forward: the reference that the others are held against
            segments = as_fresh(pieces.head, *pieces.chunks, pieces.tail)
            return Prefilled(fused=self._fusor.prefill(pieces.token_ids), segments=segments)
        steps = self.steps(pieces, method, recompute_ratio)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                prefilled: Prefilled = done.value
                return prefilled

    def steps(self, pieces: PromptPieces, method: str, recompute_ratio: float | None, namespace: str = "") -> PrefillSteps:
        """`run`, one layer a step, or a chunk that is computed first. Closing it stops the loading and releases the pins.

        Args:
            pieces: see `run`.
            method: see `run`.
            recompute_ratio: see `run`.
            namespace: whose KV may be used, and whose the missing chunks' becomes.
        """
        self.check_method(method)
        return self._methods[method](pieces, recompute_ratio, namespace)

    def _full_recompute(self, pieces: PromptPieces, _: float | None = None, __: str = "") -> PrefillSteps:
        return (yield from self._recompute(pieces, ResidentLayers()))

    def _recompute(self, pieces: PromptPieces, source: LayerSource) -> PrefillSteps:
        fused = yield from self._fusor.fuse_steps([Segment(pieces.token_ids)], source=source)
        return Prefilled(fused=fused, segments=as_fresh(pieces.head, *pieces.chunks, pieces.tail))

    def _prefix_cache(self, pieces: PromptPieces, _: float | None, namespace: str) -> PrefillSteps:
        """What the prompt begins with as an earlier one did is reused exactly, in full blocks; the rest is recomputed."""
        started = time.perf_counter()
        token_ids = pieces.token_ids
        with (
            self._prefixes.find(token_ids, len(token_ids) - 1, namespace, None) as prefix,
            LayerLoader(self._config.loader) as loader,
        ):
            lookup_s = time.perf_counter() - started
            segments = [*as_exact(prefix), Segment(token_ids[prefix.tokens :])]
            fused = yield from self._fusor.fuse_steps(segments, source=prefix.watch(loader))
            first, *rest = *prefix.planned, *behind(prefix.tokens, pieces.head, *pieces.chunks, pieces.tail)
            planned = (replace(first, key=prefix.key), *rest)
            return Prefilled(fused=fused, segments=planned, lookup_s=lookup_s, prefix=prefix, **_loaded(loader))

    def _blend(self, pieces: PromptPieces, ratio: float | None, namespace: str) -> PrefillSteps:
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are fresh."""
        for _ in range(len(pieces.chunks) + 1):
            try:
                return (yield from self._blend_once(pieces, ratio, namespace))
            except DamagedEntryError:
                continue  # the damaged entry is a miss now; the next one may be damaged as well
        return (yield from self._full_recompute(pieces))  # entries that are damaged and cannot be set aside

    def _blend_once(self, pieces: PromptPieces, ratio: float | None, namespace: str) -> PrefillSteps:
        started = time.perf_counter()
        keys = [self.key(chunk, pieces.earlier_of(index), namespace) for index, chunk in enumerate(pieces.chunks)]
        with (
            self._find_prefix(pieces, ratio, namespace) as prefix,
            self._store.pin(keys) as placements,
            LayerLoader(self._config.loader) as loader,
        ):
            ends = self._ends(pieces, prefix)
            controller = self.controller if ratio is None else None
            first = self._computed_first(pieces, placements)
            loading = (
                None if controller is None else self._plan_loading(controller, pieces, placements, first, ends.exact_tokens)
            )
            config = self._config.fusion_config(ratio if loading is None else loading.ratio)
            looked_up = time.perf_counter()
            lookup_s, precompute_s = looked_up - started, 0.0
            kvs: Sequence[SegmentKV | None] = placements
            away = AwayClock()
            if loading is not None and loading.full_recompute:
                whole = yield from away.watch(self._recompute(pieces, prefix.watch(ResidentLayers())))
                prefilled = replace(whole, segments=planned_segments(pieces, keys, placements, None))
            else:
                computed = yield from away.watch(self._precompute(first, pieces, namespace))
                precompute_s = time.perf_counter() - looked_up - away.seconds
                kvs = [
                    computed.get(chunk, stored) if not pieces.earlier_of(index) else stored
                    for index, (chunk, stored) in enumerate(zip(pieces.chunks, placements, strict=True))
                ]
                prefix.exact_tokens = next((pieces.start(at) for at, kv in enumerate(kvs) if kv is not None), None)
                prefix.keep_blended = pieces.may_be_continued
                chunks = [Segment(chunk, kv) for chunk, kv in zip(pieces.chunks, kvs, strict=True)]
                segments = [*ends.exact, Segment(ends.head), *chunks, Segment(ends.tail)]
                prefilled = Prefilled(
                    fused=(yield from away.watch(self._fusor.fuse_steps(segments, config, prefix.watch(loader)))),
                    segments=planned_segments(pieces, keys, kvs, ends),
                    recompute_ratio=config.recompute_ratio,
                )
            if controller is not None and loading is not None:
                self._tell(controller, loading, prefilled, loader, looked_up + away.seconds, precompute_s)
        for index, (key, chunk, kv) in enumerate(zip(keys, pieces.chunks, kvs, strict=True)):
            if kv is None:
                self._background.submit(key, chunk, pieces.earlier_of(index), pieces.document_of(index))
        return replace(prefilled, lookup_s=lookup_s, loading=loading, prefix=prefix, **_loaded(loader))

    def _computed_first(self, pieces: PromptPieces, placements: Sequence[Placement | None]) -> list[tuple[int, ...]]:
        """The missing chunks whose own KV is computed before the fusion: those that no reading of a document belongs to."""
        if self._config.on_miss != "precompute":
            return []
        missing = [index for index, stored in enumerate(placements) if stored is None]
        return list(dict.fromkeys(pieces.chunks[index] for index in missing if not pieces.earlier_of(index)))

    def _precompute(
        self, chunks: Sequence[tuple[int, ...]], pieces: PromptPieces, namespace: str
    ) -> Generator[None, None, dict[tuple[int, ...], ChunkKV]]:
        """The KV of chunks that no text of a document stands before, a chunk a step; it is stored as well."""
        computed: dict[tuple[int, ...], ChunkKV] = {}
        for chunk in chunks:
            (computed[chunk],) = self._fusor.precompute_document([chunk], self._head, context=self._context)
            self._background.store(
                self.key(chunk, (), namespace), computed[chunk], pieces.document_of(pieces.chunks.index(chunk))
            )
            yield
        return computed

    def _find_prefix(self, pieces: PromptPieces, ratio: float | None, namespace: str) -> AbstractContextManager[PromptPrefix]:
        """Look up what stands before the chunks: the chunks themselves are reused at any place, and blended anew."""
        before = len(pieces.head) if pieces.chunks else len(pieces.token_ids) - 1
        most = 0 if pieces.chunks and self._knows_head(pieces) else before
        return self._prefixes.find(pieces.token_ids, most, namespace, "auto" if ratio is None else str(float(ratio)))

    def _ends(self, pieces: PromptPieces, prefix: PromptPrefix) -> Ends:
        """The prompt but for its chunks, begun with the longest exact KV at hand."""
        exact, planned, done = as_exact(prefix), prefix.planned, prefix.tokens
        if self._knows_head(pieces) and done <= len(pieces.head):
            exact, done = [Segment(pieces.head, self._head_kv, exact=True)], len(pieces.head)
            planned = [PlannedSegment(kind="exact", token_ids=pieces.head, tier="memory")]
        return Ends(exact, planned, pieces.head[done:], pieces.tail[max(0, done - len(pieces.head)) :], done)

    def _knows_head(self, pieces: PromptPieces) -> bool:
        return self._head_kv is not None and pieces.head == tuple(self._head_kv.token_ids)

    def _plan_loading(
        self,
        controller: LoadingController,
        pieces: PromptPieces,
        placements: Sequence[Placement | None],
        computed_first: Sequence[tuple[int, ...]],
        exact_tokens: int,
    ) -> LoadingPlan:
        layer = self._fusor.decoder.geometry.layers - 1
        stored = [placement for placement in placements if placement is not None]
        reusable = sum(
            len(chunk)
            for index, (chunk, placement) in enumerate(zip(pieces.chunks, placements, strict=True))
            if placement is not None or (chunk in computed_first and not pieces.earlier_of(index))
        )
        return controller.plan(
            reads=[(placement.tier, placement.layer_bytes(layer)) for placement in stored],
            reusable=reusable,
            fresh=len(pieces.token_ids) - reusable - exact_tokens,
            exact=exact_tokens,
            alone=[len(chunk) for chunk in computed_first],
        )

    def _tell(
        self,
        controller: LoadingController,
        plan: LoadingPlan,
        prefilled: Prefilled,
        loader: LayerLoader,
        started: float,
        precompute_s: float,
    ) -> None:
        """Log what was predicted beside what it took, and let the controller learn from it."""
        if self._fusor.decoder.device.type == "cuda":
            torch.cuda.synchronize(self._fusor.decoder.device)  # the first token waits for the logits in any case
        prefill_s, wait_s = time.perf_counter() - started, prefilled.fused.wait_s
        # A GPU computes while the host waits, so there the two can be told apart only where the host hardly waited.
        blend_s = prefill_s - precompute_s
        waited = self._fusor.decoder.device.type == "cuda" and wait_s > 0.05 * blend_s
        controller.see(plan, load_s=loader.load_s, compute_s=None if waited else blend_s - wait_s)
        logger.info(
            "%s: prefill %.4f s, predicted %.4f; loading %.4f s, predicted %.4f",
            "full recompute" if plan.full_recompute else f"ratio {plan.ratio}",
            prefill_s,
            plan.prefill_s,
            loader.load_s,
            0.0 if plan.full_recompute else plan.load_s,
        )


def _loaded(loader: LayerLoader) -> dict[str, Any]:
    return {"load_s": loader.load_s, "loaded_bytes": dict(loader.bytes_by_tier)}


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
