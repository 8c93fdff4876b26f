"""The four ways to prefill the same token ids (paper figure 1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from cacheblend.blend import FusedPrompt, Fusor, LayerReport, Segment
from cacheblend.loader import LayerLoader, LoadingController, LoadingPlan
from cacheblend.store import ChunkKey, ChunkKV, KVStore, Placement
from cacheblend.store.errors import ConfigError, DamagedEntryError

from .answer import PlannedSegment
from .config import EngineConfig
from .hole_filler import HoleFiller
from .prompt import PromptPieces

logger = logging.getLogger(__name__)
_Done = TypeVar("_Done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt's cache and first logits, how it was prefilled, and the chunks that were not there."""

    fused: FusedPrompt
    segments: tuple[PlannedSegment, ...]
    lookup_s: float = 0.0
    load_s: float = 0.0
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    recompute_ratio: float | None = None
    loading: LoadingPlan | None = None


PrefillSteps = Generator[LayerReport, None, Prefilled]


class Prefiller:
    """Prefills prompts by the method asked for; safe to use from several threads.

    Args:
        fusor: the model.
        store: where chunks' KV is.
        holes: computes in the background what was missing.
        config: selector and loader settings.
        controller: picks the ratio where the caller does not; may be replaced. Without one, for want of a profile, it is r*.
        head: token ids that every prompt begins with; their KV is computed once and held.
        chunk_prefix_ids: what chunks are computed behind.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        holes: HoleFiller,
        config: EngineConfig,
        controller: LoadingController | None,
        head: Sequence[int],
        chunk_prefix_ids: Sequence[int],
    ) -> None:
        self._fusor, self._store, self._holes, self._config = fusor, store, holes, config
        self.controller = controller
        self._chunk_prefix_ids = tuple(chunk_prefix_ids)
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

    def key(self, token_ids: Sequence[int], namespace: str = "") -> ChunkKey:
        """The store's key of a chunk."""
        prefix_ids, model, codec = self._chunk_prefix_ids, self._fusor.fingerprint, self._config.codec
        return ChunkKey.of(token_ids, prefix_ids=prefix_ids, model=model, codec=codec, namespace=namespace)

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
            segments = _fresh(pieces.head, *pieces.chunks, pieces.tail)
            return Prefilled(fused=self._fusor.prefill(pieces.token_ids), segments=segments)
        steps = self.steps(pieces, method, recompute_ratio)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                prefilled: Prefilled = done.value
                return prefilled

    def steps(self, pieces: PromptPieces, method: str, recompute_ratio: float | None, namespace: str = "") -> PrefillSteps:
        """`run`, one layer a step. Closing the generator stops the loading and releases the pins.

        Args:
            pieces: see `run`.
            method: see `run`.
            recompute_ratio: see `run`.
            namespace: whose KV may be used, and whose the missing chunks' becomes.
        """
        self.check_method(method)
        return self._methods[method](pieces, recompute_ratio, namespace)

    def _full_recompute(self, pieces: PromptPieces, _: float | None = None, __: str = "") -> PrefillSteps:
        fused = yield from self._fusor.fuse_steps([Segment(pieces.token_ids)])
        return Prefilled(fused=fused, segments=_fresh(pieces.head, *pieces.chunks, pieces.tail))

    def _prefix_cache(self, pieces: PromptPieces, _: float | None, namespace: str) -> PrefillSteps:
        """Head and first chunk are reused exactly, as prefix caching does; a later request finds what this one missed."""
        started = time.perf_counter()
        prefix = (*pieces.head, *(pieces.chunks[0] if pieces.chunks else ()))
        if not prefix:
            return (yield from self._full_recompute(pieces))
        rest = _fresh(*pieces.chunks[1:], pieces.tail)
        key = ChunkKey.of(prefix, prefix_ids=(), model=self._fusor.fingerprint, namespace=namespace)
        with self._store.pin([key]) as (placement,), LayerLoader(self._config.loader) as loader:
            lookup_s = time.perf_counter() - started
            if placement is not None:
                segments = [Segment(prefix, placement, exact=True), *(Segment(segment.token_ids) for segment in rest)]
                try:
                    fused = yield from self._fusor.fuse_steps(segments, source=loader)
                except DamagedEntryError:
                    pass  # a miss from now on
                else:
                    head = PlannedSegment(kind="exact", token_ids=prefix, key=str(key), tier=placement.tier)
                    return Prefilled(fused=fused, segments=(head, *rest), lookup_s=lookup_s, **_loaded(loader))
        self._holes.fill(key, prefix, ())
        head = PlannedSegment(kind="fresh", token_ids=prefix, key=str(key))
        whole = yield from self._full_recompute(pieces)
        return replace(whole, segments=(head, *rest), lookup_s=lookup_s)

    def _blend(self, pieces: PromptPieces, ratio: float | None, namespace: str) -> PrefillSteps:
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are holes."""
        for _ in range(len(pieces.chunks) + 1):
            try:
                return (yield from self._blend_once(pieces, ratio, namespace))
            except DamagedEntryError:
                continue  # the damaged entry is a miss now, and so a hole; the next one may be damaged as well
        return (yield from self._full_recompute(pieces))  # entries that are damaged and cannot be set aside

    def _blend_once(self, pieces: PromptPieces, ratio: float | None, namespace: str) -> PrefillSteps:
        started = time.perf_counter()
        keys = [self.key(chunk, namespace) for chunk in pieces.chunks]
        with self._store.pin(keys) as placements, LayerLoader(self._config.loader) as loader:
            controller = self.controller if ratio is None else None
            loading = None if controller is None else self._plan_loading(controller, pieces, placements)
            config = self._config.fusion_config(ratio if loading is None else loading.ratio)
            looked_up = time.perf_counter()
            lookup_s = looked_up - started
            away = _Away()
            if loading is not None and loading.full_recompute:
                whole = yield from away.watch(self._full_recompute(pieces))
                prefilled = replace(whole, segments=self._planned(pieces, keys, placements, reuse=False))
            else:
                segments = [Segment(chunk, placement) for chunk, placement in zip(pieces.chunks, placements, strict=True)]
                known_head = self._head_kv is not None and pieces.head == tuple(self._head_kv.token_ids)
                head = Segment(pieces.head, self._head_kv, exact=True) if known_head else Segment(pieces.head)
                steps = self._fusor.fuse_steps([head, *segments, Segment(pieces.tail)], config, loader)
                prefilled = Prefilled(
                    fused=(yield from away.watch(steps)),
                    segments=self._planned(pieces, keys, placements, reuse=True, exact_head=known_head),
                    recompute_ratio=config.recompute_ratio,
                )
            if controller is not None and loading is not None:
                self._tell(controller, loading, prefilled, loader, looked_up + away.seconds)
        for index, (key, chunk, placement) in enumerate(zip(keys, pieces.chunks, placements, strict=True)):
            if placement is None:
                self._holes.fill(key, chunk, self._chunk_prefix_ids, pieces.before(index))
        return replace(prefilled, lookup_s=lookup_s, loading=loading, **_loaded(loader))

    @staticmethod
    def _planned(
        pieces: PromptPieces,
        keys: Sequence[ChunkKey],
        placements: Sequence[Placement | None],
        *,
        reuse: bool,
        exact_head: bool = False,
    ) -> tuple[PlannedSegment, ...]:
        """The prompt's segments; without `reuse` what is stored was not used: neither a hit nor a miss."""
        planned = list(_fresh(pieces.head))
        if exact_head:
            planned = [replace(head, kind="exact", tier="memory") for head in planned]
        for chunk, key, placement in zip(pieces.chunks, keys, placements, strict=True):
            if placement is None:
                planned.append(PlannedSegment(kind="fresh", token_ids=chunk, key=str(key)))
            elif reuse:
                planned.append(PlannedSegment(kind="reused", token_ids=chunk, key=str(key), tier=placement.tier))
            else:
                planned += _fresh(chunk)
        return (*planned, *_fresh(pieces.tail))

    def _plan_loading(
        self, controller: LoadingController, pieces: PromptPieces, placements: Sequence[Placement | None]
    ) -> LoadingPlan:
        layer = self._fusor.decoder.geometry.layers - 1
        stored = [placement for placement in placements if placement is not None]
        reusable = sum(placement.tokens for placement in stored)
        return controller.plan(
            reads=[(placement.tier, placement.layer_bytes(layer)) for placement in stored],
            reusable=reusable,
            fresh=sum(map(len, pieces.chunks)) - reusable + len(pieces.tail),
            exact=len(pieces.head),
        )

    def _tell(
        self, controller: LoadingController, plan: LoadingPlan, prefilled: Prefilled, loader: LayerLoader, started: float
    ) -> None:
        """Log what was predicted beside what it took, and let the controller learn from it."""
        if self._fusor.decoder.device.type == "cuda":
            torch.cuda.synchronize(self._fusor.decoder.device)  # the first token waits for the logits in any case
        prefill_s, wait_s = time.perf_counter() - started, prefilled.fused.wait_s
        # A GPU computes while the host waits, so there the two can be told apart only where the host hardly waited.
        waited = self._fusor.decoder.device.type == "cuda" and wait_s > 0.05 * prefill_s
        controller.see(plan, load_s=loader.load_s, compute_s=None if waited else prefill_s - wait_s)
        logger.info(
            "%s: prefill %.4f s, predicted %.4f; loading %.4f s, predicted %.4f",
            "full recompute" if plan.full_recompute else f"ratio {plan.ratio}",
            prefill_s,
            plan.prefill_s,
            loader.load_s,
            0.0 if plan.full_recompute else plan.load_s,
        )


class _Away:
    """Counts the seconds between the steps of a prefill, in which others ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, steps: Generator[LayerReport, None, _Done]) -> Generator[LayerReport, None, _Done]:
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


def _loaded(loader: LayerLoader) -> dict[str, Any]:
    return {"load_s": loader.load_s, "loaded_bytes": dict(loader.bytes_by_tier)}


def _fresh(*pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    return tuple(PlannedSegment(kind="fresh", token_ids=token_ids) for token_ids in pieces if token_ids)
