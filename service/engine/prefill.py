"""Prefill of a request by one of four methods (paper figure 1): the prompt's KV, and the logits after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from typing import TypeVar

import torch

from cacheblend.base.errors import ConfigError, DamagedEntryError
from cacheblend.blend import Fusor, LayerReport, ResidentLayers, Segment
from cacheblend.loader import LayerLoader, LoadingController, LoadingPlan, WorkEstimator
from cacheblend.store import BLOCK_TOKENS, ChunkKey, ChunkKV, KVHandle, KVStore, Placement

from .background_precompute import BackgroundPrecompute
from .chunk_contexts import ChunkEncoder
from .config import EngineConfig
from .prefix_cache import CachedPrefix, PrefixCache
from .prompt import PromptTokens
from .request import PlannedSegment, Request

logger = logging.getLogger(__name__)
T = TypeVar("T")
PrefillSteps = Generator[LayerReport, None, None]


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
        """Prefill a request, a layer a step; the result stands in the request at the end.

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
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are computed.

        An entry that turns out to be damaged is a miss in the next round.
        """
        for _ in range(len(request.prompt.chunks) + 1):
            with suppress(DamagedEntryError):
                yield from self._blend_once(request, ratio)
                return
        yield from self._full_recompute(request)  # entries that are damaged and cannot be set aside

    def _blend_once(self, request: Request, ratio: float | None) -> PrefillSteps:
        """One round of `_blend`.

        Raises:
            DamagedEntryError: a stored entry turned out to be damaged; it is a miss from now on.
        """
        prompt, namespace = request.prompt, request.namespace
        keys = self._keys(prompt, namespace)
        started, watch = time.perf_counter(), _PreemptionWatch()
        with (
            self._find_prefix(prompt, ratio, namespace) as prefix,
            self._store.pin(keys) as placements,
            LayerLoader(self._config.loader) as loader,
        ):
            # 1. Plan: the ratio, and whether full recompute is predicted to be faster.
            exact, planned = self._exact_segments(prompt, prefix)
            exact_tokens = sum(len(segment.token_ids) for segment in exact)
            stored = [placement for placement in placements if placement is not None]
            reusable = sum(len(placement.token_ids) for placement in stored)
            fresh = len(prompt.token_ids) - reusable - exact_tokens
            controller = self.controller if ratio is None else None
            if controller is None:
                loading, r_star = None, self._config.loader.quality_ratio
                full = ratio is None and self.work.is_short(r_star, reusable, fresh, exact_tokens)
            else:
                layer = self._fusor.decoder.geometry.layers - 1
                reads = [(placement.tier, placement.layer_bytes(layer)) for placement in stored]
                loading = controller.plan(reads=reads, reusable=reusable, fresh=fresh, exact=exact_tokens)
                full = loading.full_recompute
            if full:
                exact, planned, exact_tokens = [], [], 0
            fusion = self._config.fusion_config(ratio if loading is None else loading.ratio)
            planned_at = time.perf_counter()

            # 2. Lay the segments end to end.
            kvs: Sequence[KVHandle | None] = [None] * len(keys) if full else placements
            before, after = prompt.prefix[exact_tokens:], prompt.suffix[max(0, exact_tokens - len(prompt.prefix)) :]
            chunks = [Segment(chunk, kv) for chunk, kv in zip(prompt.chunks, kvs, strict=True)]
            segments = [*exact, Segment(before), *chunks, Segment(after)]
            planned += [*_fresh(before), *_planned_chunks(prompt, keys, kvs, placements), *_fresh(after)]
            prefix.exact_tokens = next((prompt.start(at) for at, kv in enumerate(kvs) if kv is not None), None)
            prefix.commit_blended = prompt.cache_suffix

            # 3. Fuse, a layer a step; the loader reads the next layers meanwhile.
            source = prefix.record(ResidentLayers() if full else loader)
            fused = yield from watch.over(self._fusor.fuse_steps(segments, fusion, source))

            # 4. Compare the plan with what it took, and note the result.
            if controller is not None and loading is not None:
                prefill_s = self._synchronized() - planned_at - watch.preempted_s
                self._observe(controller, loading, loader.load_s, prefill_s, fused.wait_s)
            request.lookup_s = planned_at - started
            request.loading, request.prefix = loading, prefix
            request.load_s, request.loaded_bytes = loader.load_s, loader.bytes_by_tier
            request.fused_ratio = None if full else fusion.recompute_ratio
            request.finish_prefill(fused, planned)
        # 5. Have the misses computed after the running requests.
        for at, (key, chunk) in enumerate(zip(keys, prompt.chunks, strict=True)):
            if placements[at] is None and not prompt.is_between(at):
                self._background.submit(key, chunk, prompt.earlier_of(at), prompt.document_of(at))

    def fetch(self, prompt: PromptTokens, namespace: str) -> None:
        """Fetch the KV of a prompt's chunks that nothing but the remote tier has, while that is faster than computing it."""
        if not self._store.has_remote:
            return
        keys = self._keys(prompt, namespace)
        missing = sum(len(chunk) for key, chunk in zip(keys, prompt.chunks, strict=True) if key not in self._store)
        self._store.fetch(keys, (self.controller or self.work).full_s(missing))

    def _keys(self, prompt: PromptTokens, namespace: str) -> list[ChunkKey]:
        return [self._encoder.key(chunk, prompt.earlier_of(at), namespace) for at, chunk in enumerate(prompt.chunks)]

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
        wait_s: float,
    ) -> None:
        """Log what was predicted beside what it took, and let the controller learn from it."""
        # A GPU computes while the host waits, so there the two can be separated only where the host hardly waited.
        waited = self._fusor.decoder.device.type == "cuda" and wait_s > 0.05 * prefill_s
        controller.record(plan, load_s=load_s, compute_s=None if waited else prefill_s - wait_s)
        logger.info(
            "%s: prefill %.4f s, predicted %.4f; loading %.4f s, predicted %.4f",
            "full recompute" if plan.full_recompute else f"ratio {plan.ratio}",
            prefill_s,
            plan.prefill_s,
            load_s,
            0.0 if plan.full_recompute else plan.load_s,
        )


class _PreemptionWatch:
    """Seconds in which others ran between a request's steps."""

    def __init__(self) -> None:
        self.preempted_s = 0.0

    def over(self, steps: Generator[LayerReport, None, T]) -> Generator[LayerReport, None, T]:
        """The same steps, with a pause after each."""
        with closing(steps):
            while True:
                try:
                    report = next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result
                paused = time.perf_counter()
                yield report
                self.preempted_s += time.perf_counter() - paused


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
