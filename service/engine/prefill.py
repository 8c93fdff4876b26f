"""Prefill of a request by one of four methods (paper figure 1): the prompt's KV, and the logits after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from cacheblend.base.errors import ConfigError, DamagedEntryError, RemoteError
from cacheblend.base.threads import DaemonThreads
from cacheblend.blend import WAITING, FrontedLayers, Fusor, LayerReport, Prompt, ResidentLayers, Segment
from cacheblend.loader import FrontChunk, LayerLoader, LoadingController, LoadingPlan, TierSpeed, WorkEstimator
from cacheblend.loader.layer_loader import TURN_S
from cacheblend.store import BLOCK_TOKENS, ChunkKey, ChunkKV, KVHandle, KVStore, Placement, PrefixRun
from cacheblend.store.tiers import REMOTE

from .background_precompute import BackgroundPrecompute
from .chunk_contexts import ChunkEncoder
from .config import EngineConfig
from .prefix_cache import CachedPrefix, PrefixCache
from .prompt import PromptTokens
from .request import PlannedSegment, Request

if TYPE_CHECKING:
    from cacheblend.loader.estimators import Read

logger = logging.getLogger(__name__)
T = TypeVar("T")
LOOKUPS = DaemonThreads("cacheblend-lookups")  # a remote tier may take its time-out to answer
MAX_REMOTE_DAMAGES = 2  # of a request, until it does without the remote tier
PrefillSteps = Generator[LayerReport | None, None, None]


class Prefiller:
    """Prefills requests by the method that each asks for; safe to use from several threads.

    Args:
        fusor: the model.
        store: where chunks' KV is.
        prefixes: blocks of what was served before.
        encoder: names chunks' KV, and computes it. The KV of its prefix is computed once and held.
        background: computes missing chunks' KV after the requests.
        config: selector and loader settings.
        controller: picks the ratio where the request does not; may be replaced. Without one, for want of a profile, it is r*,
            and full recompute for prompts that are too short to gain by blending.

    Attributes:
        work: counts a request's work, where nothing predicts its seconds.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        prefixes: PrefixCache,
        encoder: ChunkEncoder,
        background: BackgroundPrecompute,
        config: EngineConfig,
        controller: LoadingController | None,
    ) -> None:
        self._fusor, self._store, self._prefixes, self._encoder = fusor, store, prefixes, encoder
        self._background, self._config, self.controller = background, config, controller
        self._prefix_kv: ChunkKV | None = fusor.precompute(encoder.prefix_ids) if encoder.prefix_ids else None
        self.work = WorkEstimator(
            schedule=config.fusion_config(None).schedule,
            layers=fusor.decoder.geometry.layers,
            row_multiply_adds=fusor.decoder.layer_parameters,
            device_type=fusor.decoder.device.type,
        )
        self._methods: dict[str, Callable[[Request], PrefillSteps]] = {
            "full_recompute": self._full_recompute,
            "prefix_cache": self._prefix_cache,
            "full_reuse": lambda request: self._blend(request, 0.0),
            "blend": lambda request: self._blend(request, request.recompute_ratio),
        }

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def check_method(self, method: str) -> None:
        """Refuse an unknown method.

        Raises:
            ConfigError: so.
        """
        if not isinstance(method, str) or method not in self._methods:
            raise ConfigError("method", method, f"one of {', '.join(self._methods)}")

    def steps(self, request: Request) -> PrefillSteps:
        """Prefill a request, a layer a step, or a chunk that is computed first; the result stands in the request at the end.

        Closing it stops the loading and releases the pins.

        Raises:
            ConfigError: an unknown method, or a ratio outside 0..1.
        """
        self.check_method(request.method)
        return self._methods[request.method](request)

    def _full_recompute(self, request: Request) -> PrefillSteps:
        """Compute everything."""
        fused = yield from self._fusor.fuse_steps([Segment(request.prompt.token_ids)])
        request.finish_prefill(fused, _fresh_after(0, request.prompt))

    def _prefix_cache(self, request: Request) -> PrefillSteps:
        """Reuse what the prompt begins with as an earlier one did, exactly, in full blocks; compute the others."""
        started = time.perf_counter()
        token_ids = request.prompt.token_ids
        with (
            self._prefixes.find(token_ids, len(token_ids) - 1, request.namespace, None) as prefix,
            LayerLoader(self._config.loader) as loader,
        ):
            request.lookup_s = time.perf_counter() - started
            segments = [*_run_segments(prefix), Segment(token_ids[prefix.tokens :])]
            fused = yield from self._fusor.fuse_steps(segments, source=prefix.record(loader))
            first, *others = *_planned_run(prefix), *_fresh_after(prefix.tokens, request.prompt)
            request.prefix, request.load_s, request.loaded_bytes = prefix, loader.load_s, loader.bytes_by_tier
            request.finish_prefill(fused, [replace(first, key=prefix.key), *others])

    def _blend(self, request: Request, ratio: float | None) -> PrefillSteps:
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are computed."""
        prompt, namespace = request.prompt, request.namespace
        keys = [self._encoder.key(chunk, prompt.earlier_of(at), namespace) for at, chunk in enumerate(prompt.chunks)]
        use_remote, remote_damages, front = True, 0, _Front()
        for _ in range(len(keys) + 1):  # an entry that turns out to be damaged is a miss in the next round
            started, lookup, watch = time.perf_counter(), _PreemptionWatch(), _PreemptionWatch()
            placements: Sequence[Placement | None] = ()
            try:
                with (
                    self._find_prefix(prompt, ratio, namespace) as prefix,
                    ExitStack() as pins,
                    LayerLoader(self._config.loader) as loader,
                ):
                    placements = yield from self._pin(keys, use_remote, pins, lookup)
                    # 1. Plan: the ratio, whether full recompute is predicted to be faster, which misses are computed first.
                    exact, planned = self._exact_segments(prompt, prefix)
                    exact_tokens = sum(len(segment.token_ids) for segment in exact)
                    stored = [*[None] * front.chunks, *placements[front.chunks :]]
                    early = self._early_misses(prompt, stored, front.chunks)
                    known = max(exact_tokens, front.tokens)
                    controller = self.controller if ratio is None else None
                    loader.takes_turns = True
                    if self._store.remote is not None:
                        loader.restart_s, loader.latency_s = self._without_remote(prompt, known)
                    reusable, fresh, precomputed = self._count_tokens(prompt, stored, early, known)
                    if controller is None:
                        loading, r_star = None, self._config.loader.quality_ratio
                        full = ratio is None and self.work.is_short(r_star, reusable, fresh, known, sum(precomputed))
                    else:
                        reads = self._reads(stored)
                        may_stand_first = [] if front.chunks else zip(prompt.chunks, reads, strict=True)
                        loading = controller.plan(
                            reads=[read for read in reads if read is not None],
                            reusable=reusable,
                            fresh=fresh,
                            exact=known,
                            precomputed=precomputed,
                            front=[FrontChunk(len(chunk), read) for chunk, read in may_stand_first][: min(early, default=None)],
                            remote_speed=self._remote_speed(),
                        )
                        full = loading.full_recompute
                        loader.restart_s, loader.latency_s = loading.full_s - loading.front_s, loading.latency_s
                    if full and not front.chunks:
                        exact, planned, exact_tokens, early = [], [], 0, []
                    fusion = self._config.fusion_config(ratio if loading is None else loading.ratio)
                    planned_at = time.perf_counter()

                    # 2. Compute those misses, a chunk a step, and have their KV stored.
                    computed: dict[tuple[int, ...], ChunkKV] = {}
                    for at in early:
                        chunk = prompt.chunks[at]
                        computed[chunk] = self._encoder.compute(chunk, ())
                        self._background.store(keys[at], computed[chunk], prompt.document_of(at))
                        yield from watch.pause()
                    precompute_s = time.perf_counter() - planned_at - watch.preempted_s

                    # 3. Lay the segments end to end.
                    front_chunks = front.chunks if full or loading is None else front.chunks or loading.front_chunks
                    kvs: list[KVHandle | None] = [None] * len(keys)
                    if not full:
                        for at, (chunk, placement) in enumerate(zip(prompt.chunks, stored, strict=True)):
                            if at >= front_chunks:
                                kvs[at] = placement if prompt.earlier_of(at) else computed.get(chunk, placement)
                    before, after = prompt.prefix[exact_tokens:], prompt.suffix[max(0, exact_tokens - len(prompt.prefix)) :]
                    chunks = [Segment(chunk, kv) for chunk, kv in zip(prompt.chunks, kvs, strict=True)]
                    segments = [*exact, Segment(before), *chunks, Segment(after)]
                    planned += [*_fresh(before), *_planned_chunks(prompt, keys, kvs, placements), *_fresh(after)]
                    prefix.exact_tokens = next((prompt.start(at) for at, kv in enumerate(kvs) if kv is not None), None)
                    prefix.commit_blended = prompt.cache_suffix

                    # 4. Compute the front, a layer a step; the loader reads the others' KV meanwhile.
                    source = prefix.record(ResidentLayers() if full else loader)
                    if front_chunks:
                        first, others = segments[: len(exact) + 1 + front_chunks], segments[len(exact) + 1 + front_chunks :]
                        unread = Segment([token for segment in first for token in segment.token_ids])
                        source.start(Prompt.of([unread, *others]), self._fusor.runner.geometry, reuse_layer_0=True)
                        if not front.chunks:
                            front = _Front(front_chunks, (yield from watch.over(self._fusor.front_steps(first))))
                        assert front.run is not None, "it was computed just now, or in the round before"
                        segments = [Segment(unread.token_ids, front.run, exact=True), *others]
                        source = FrontedLayers(source, front.run)

                    # 5. Fuse, a layer a step; the loader reads the next layers meanwhile.
                    fused = yield from watch.over(self._fusor.fuse_steps(segments, fusion, source))
                    if front_chunks:
                        fused = fused.with_front(exact_tokens)

                    # 6. Compare the plan with what it took, and note the result.
                    if controller is not None and loading is not None:
                        prefill_s = self._synchronized() - planned_at - watch.preempted_s
                        self._observe(controller, loading, loader.load_s, prefill_s, precompute_s, fused.wait_s)
                    request.lookup_s = planned_at - started - lookup.preempted_s
                    request.loading, request.prefix = loading, prefix
                    request.load_s, request.loaded_bytes = loader.load_s, loader.bytes_by_tier
                    request.fused_ratio = None if full else fusion.recompute_ratio
                    request.finish_prefill(fused, planned)
            except DamagedEntryError:
                # Where one entry is gone from the remote tier, others are as a rule: all are looked up anew, and once only.
                found = [one.key.digest for one in placements if one is not None and one.tier == REMOTE]
                if found and self._store.remote is not None:
                    self._store.remote.forget(found)
                    remote_damages += 1
                    use_remote = remote_damages < MAX_REMOTE_DAMAGES
                continue
            except RemoteError as error:  # what is remote is recomputed
                logger.info("a request does without the remote tier: %s", error)
                use_remote = False
                continue
            # 7. Have the other misses computed after the running requests.
            for at, (key, chunk) in enumerate(zip(keys, prompt.chunks, strict=True)):
                if kvs[at] is None and placements[at] is None and not prompt.is_between(at):
                    self._background.submit(key, chunk, prompt.earlier_of(at), prompt.document_of(at))
            return
        yield from self._full_recompute(request)  # entries that are damaged and cannot be set aside

    def _pin(
        self, keys: Sequence[ChunkKey], use_remote: bool, pins: ExitStack, watch: _PreemptionWatch
    ) -> Generator[LayerReport | None, None, Sequence[Placement | None]]:
        """Pin what is stored until `pins` ends; others run while the remote tier is asked."""
        pin = self._store.pin(keys, remote=use_remote)
        if self._store.remote is None or not use_remote:
            return pins.enter_context(pin)
        pinned = LOOKUPS.call(pin.__enter__)
        try:
            while wait([pinned], TURN_S).not_done:
                yield from watch.pause(WAITING)
        except GeneratorExit:  # the request is over, and its look-up will be
            pinned.add_done_callback(lambda done: None if done.exception() else pin.__exit__(None, None, None))
            raise
        placements = pinned.result()
        pins.push(pin)
        return placements

    def _without_remote(self, prompt: PromptTokens, known: int) -> tuple[float, float]:
        """Seconds to compute what a request's remote KV saves at most, and those that its first bytes are known to take."""
        estimator, speed = self.controller or self.work, self._remote_speed()
        full_s = estimator.full_s(len(prompt.token_ids) - known)
        return full_s, 0.0 if speed is None else speed.latency_s

    def _reads(self, stored: Sequence[Placement | None]) -> list[Read | None]:
        """The read of a layer of each chunk; None for a miss."""
        layer = self._fusor.decoder.geometry.layers - 1
        return [None if one is None else (one.tier, one.layer_bytes(layer)) for one in stored]

    def _remote_speed(self) -> TierSpeed | None:
        """What the remote tier's reads cost lately."""
        remote = self._store.remote
        speed = None if remote is None else remote.speed()
        return None if speed is None else TierSpeed(read_s=0.0, bytes_per_s=speed.bytes_per_s, latency_s=speed.latency_s)

    def _early_misses(self, prompt: PromptTokens, placements: Sequence[Placement | None], first_at: int) -> list[int]:
        """Places, from `first_at` on, of the missing chunks whose own KV is computed before the fusion: those that no reading
        of a document belongs to, equal ones once.
        """
        if self._config.on_miss != "precompute":
            return []
        first: dict[tuple[int, ...], int] = {}
        for at, (chunk, stored) in enumerate(zip(prompt.chunks, placements, strict=True)):
            if at >= first_at and stored is None and not prompt.earlier_of(at) and not prompt.is_between(at):
                first.setdefault(chunk, at)
        return list(first.values())

    def _find_prefix(self, prompt: PromptTokens, ratio: float | None, namespace: str) -> AbstractContextManager[CachedPrefix]:
        """Look up what stands before the chunks: the chunks themselves are reused at any place, and blended anew."""
        before = len(prompt.prefix) if prompt.chunks else len(prompt.token_ids) - 1
        limit = 0 if prompt.chunks and self._holds_prefix_of(prompt) else before
        return self._prefixes.find(prompt.token_ids, limit, namespace, "auto" if ratio is None else str(float(ratio)))

    def _exact_segments(self, prompt: PromptTokens, prefix: CachedPrefix) -> tuple[list[Segment], list[PlannedSegment]]:
        """The longest exact KV at hand that the prompt begins with, for the fusor and for the plan."""
        if self._holds_prefix_of(prompt) and prefix.tokens <= len(prompt.prefix):
            planned = PlannedSegment(kind="exact", token_ids=prompt.prefix, tier="memory")
            return [Segment(prompt.prefix, self._prefix_kv, exact=True)], [planned]
        return _run_segments(prefix), _planned_run(prefix)

    def _holds_prefix_of(self, prompt: PromptTokens) -> bool:
        return self._prefix_kv is not None and prompt.prefix == self._encoder.prefix_ids

    def _count_tokens(
        self, prompt: PromptTokens, placements: Sequence[Placement | None], early: Sequence[int], exact_tokens: int
    ) -> tuple[int, int, list[int]]:
        """Reusable and fresh tokens of a prompt, and those of each reusable chunk that is computed first."""
        computed = {prompt.chunks[at] for at in early}
        reusable = sum(
            len(chunk)
            for at, (chunk, placement) in enumerate(zip(prompt.chunks, placements, strict=True))
            if placement is not None or (chunk in computed and not prompt.earlier_of(at))
        )
        return reusable, len(prompt.token_ids) - reusable - exact_tokens, [len(chunk) for chunk in computed]

    def _synchronized(self) -> float:
        """Seconds of `time.perf_counter` when a GPU has run the prefill; the first token waits for that anyway."""
        if self._fusor.decoder.device.type == "cuda":  # not the whole device: others' layers are being copied to it
            torch.cuda.current_stream(self._fusor.decoder.device).synchronize()
        return time.perf_counter()

    def _observe(
        self,
        controller: LoadingController,
        plan: LoadingPlan,
        load_s: float,
        prefill_s: float,
        precompute_s: float,
        wait_s: float,
    ) -> None:
        """Log what was predicted beside what it took, and let the controller learn from it."""
        blend_s = prefill_s - precompute_s
        # A GPU computes while the host waits, so there the two can be separated only where the host hardly waited.
        waited = self._fusor.decoder.device.type == "cuda" and wait_s > 0.05 * blend_s
        controller.record(plan, load_s=load_s, compute_s=None if waited else blend_s - wait_s)
        logger.info(
            "%s: prefill %.4f s, predicted %.4f; loading %.4f s, predicted %.4f",
            "full recompute" if plan.full_recompute else f"ratio {plan.ratio}",
            prefill_s,
            plan.prefill_s,
            load_s,
            0.0 if plan.full_recompute else plan.load_s,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """A prompt's first chunks, and their exact KV with what stands before them; none of either before it is computed."""

    chunks: int = 0
    run: PrefixRun | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the KV."""
        return 0 if self.run is None else len(self.run.token_ids)


class _PreemptionWatch:
    """Seconds in which others ran between a request's steps."""

    def __init__(self) -> None:
        self.preempted_s = 0.0

    def pause(self, report: LayerReport | None = None) -> Generator[LayerReport | None, None, None]:
        """Let others run."""
        paused = time.perf_counter()
        yield report
        self.preempted_s += time.perf_counter() - paused

    def over(self, steps: Generator[LayerReport, None, T]) -> Generator[LayerReport | None, None, T]:
        """The same steps, with a pause after each."""
        with closing(steps):
            while True:
                try:
                    report = next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result
                yield from self.pause(report)


def _fresh(*parts: tuple[int, ...]) -> list[PlannedSegment]:
    """Parts of a prompt that are computed whole."""
    return [PlannedSegment(kind="fresh", token_ids=token_ids) for token_ids in parts if token_ids]


def _fresh_after(tokens: int, prompt: PromptTokens) -> list[PlannedSegment]:
    """What is computed of a prompt after its first `tokens` tokens."""
    parts: list[tuple[int, ...]] = []
    for part in (prompt.prefix, *prompt.chunks, prompt.suffix):
        parts.append(part[tokens:])
        tokens = max(0, tokens - len(part))
    return _fresh(*parts)


def _run_segments(prefix: CachedPrefix) -> list[Segment]:
    """The run that was found, for the fusor."""
    return [] if prefix.run is None else [Segment(prefix.run.token_ids, prefix.run, exact=True)]


def _planned_run(prefix: CachedPrefix) -> list[PlannedSegment]:
    """The run that was found, for the plan: its exact part, and its blended one."""
    if prefix.run is None:
        return []
    border = prefix.run.first_chain_blocks * BLOCK_TOKENS
    parts = (("exact", prefix.run.token_ids[:border]), ("blended", prefix.run.token_ids[border:]))
    return [PlannedSegment(kind=kind, token_ids=token_ids, tier="memory") for kind, token_ids in parts if token_ids]


def _planned_chunks(
    prompt: PromptTokens,
    keys: Sequence[ChunkKey],
    kvs: Sequence[KVHandle | None],
    placements: Sequence[Placement | None],
) -> Iterator[PlannedSegment]:
    """The chunks for the plan. What is stored and was not used, for full recompute, is neither a hit nor a miss."""
    for at, (chunk, kv, placement) in enumerate(zip(prompt.chunks, kvs, placements, strict=True)):
        yield PlannedSegment(
            kind="fresh" if kv is None else "reused",
            token_ids=chunk,
            key=None if kv is None and (placement is not None or prompt.is_between(at)) else str(keys[at]),
            tier=placement.tier if kv is not None and placement is not None else None,
            earlier=prompt.earlier_of(at),
        )
