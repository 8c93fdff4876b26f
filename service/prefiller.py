"""The four ways to prefill the same token ids (paper figure 1)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend.blend import FusedPrompt, Fusor, Segment
from cacheblend.loader import LayerLoader, LoadingController, LoadingPlan
from cacheblend.store import ChunkKey, ChunkKV, KVStore, Placement
from cacheblend.store.errors import ConfigError, DamagedEntryError

from .answer import PlannedSegment
from .config import EngineConfig
from .hole_filler import HoleFiller
from .prompt import PromptPieces


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


class Prefiller:
    """Prefills prompts by the method asked for; safe to use from several threads.

    Args:
        fusor: the model.
        store: where chunks' KV is.
        controller: picks the ratio where the caller does not.
        holes: computes in the background what was missing.
        config: selector and loader settings.
        head: token ids that every prompt begins with; their KV is computed once and held.
        chunk_prefix_ids: what chunks are computed behind.
    """

    def __init__(
        self,
        fusor: Fusor,
        store: KVStore,
        controller: LoadingController,
        holes: HoleFiller,
        config: EngineConfig,
        head: Sequence[int],
        chunk_prefix_ids: Sequence[int],
    ) -> None:
        self._fusor, self._store, self._controller, self._holes, self._config = fusor, store, controller, holes, config
        self._chunk_prefix_ids = tuple(chunk_prefix_ids)
        self._head_kv: ChunkKV | None = fusor.precompute(head) if head else None
        self._methods: dict[str, Callable[[PromptPieces, float | None], Prefilled]] = {
            "full_recompute": self._full_recompute,
            "prefix_cache": self._prefix_cache,
            "full_reuse": lambda pieces, _: self._blend(pieces, 0.0),
            "blend": self._blend,
        }

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The store's key of a chunk."""
        return ChunkKey.of(token_ids, prefix_ids=self._chunk_prefix_ids, model=self._fusor.fingerprint)

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
        return self._methods[method](pieces, recompute_ratio)

    def _full_recompute(self, pieces: PromptPieces, _: float | None = None) -> Prefilled:
        fused = self._fusor.prefill(pieces.token_ids)
        return Prefilled(fused=fused, segments=_fresh(pieces.head, *pieces.chunks, pieces.tail))

    def _prefix_cache(self, pieces: PromptPieces, _: float | None) -> Prefilled:
        """Head and first chunk are reused exactly, as prefix caching does; a later request finds what this one missed."""
        started = time.perf_counter()
        prefix = (*pieces.head, *(pieces.chunks[0] if pieces.chunks else ()))
        if not prefix:
            return self._full_recompute(pieces)
        rest = _fresh(*pieces.chunks[1:], pieces.tail)
        key = ChunkKey.of(prefix, prefix_ids=(), model=self._fusor.fingerprint)
        with self._store.pin([key]) as (placement,), LayerLoader(self._config.loader.lookahead_layers) as loader:
            lookup_s = time.perf_counter() - started
            if placement is not None:
                segments = [Segment(prefix, placement, exact=True), *(Segment(segment.token_ids) for segment in rest)]
                try:
                    fused = self._fusor.fuse(segments, source=loader)
                except DamagedEntryError:
                    pass  # a miss from now on
                else:
                    head = PlannedSegment(kind="exact", token_ids=prefix, key=str(key), tier=placement.tier)
                    return Prefilled(fused=fused, segments=(head, *rest), lookup_s=lookup_s, **_loaded(loader))
        self._holes.fill(key, prefix, ())
        head = PlannedSegment(kind="fresh", token_ids=prefix, key=str(key))
        return replace(self._full_recompute(pieces), segments=(head, *rest), lookup_s=lookup_s)

    def _blend(self, pieces: PromptPieces, ratio: float | None) -> Prefilled:
        """Reuse every chunk that is stored, at whatever place, and recompute `ratio` of it; missing ones are holes."""
        for _ in range(len(pieces.chunks) + 1):
            try:
                return self._blend_once(pieces, ratio)
            except DamagedEntryError:
                continue  # the damaged entry is a miss now, and so a hole; the next one may be damaged as well
        return self._full_recompute(pieces)  # entries that are damaged and cannot be set aside

    def _blend_once(self, pieces: PromptPieces, ratio: float | None) -> Prefilled:
        started = time.perf_counter()
        keys = [self.key(chunk) for chunk in pieces.chunks]
        with self._store.pin(keys) as placements, LayerLoader(self._config.loader.lookahead_layers) as loader:
            loading = self._plan_loading(pieces, placements) if ratio is None else None
            config = self._config.fusion_config(ratio if loading is None else loading.ratio)
            lookup_s = time.perf_counter() - started
            if loading is not None and loading.full_recompute:
                prefilled = replace(self._full_recompute(pieces), segments=self._planned(pieces, keys, placements, reuse=False))
            else:
                segments = [Segment(chunk, placement) for chunk, placement in zip(pieces.chunks, placements, strict=True)]
                head = [Segment(pieces.head, self._head_kv, exact=True)] if self._head_kv is not None else []
                prefilled = Prefilled(
                    fused=self._fusor.fuse([*head, *segments, Segment(pieces.tail)], config, loader),
                    segments=self._planned(pieces, keys, placements, reuse=True),
                    recompute_ratio=config.recompute_ratio,
                )
        for key, chunk, placement in zip(keys, pieces.chunks, placements, strict=True):
            if placement is None:
                self._holes.fill(key, chunk, self._chunk_prefix_ids)
        return replace(prefilled, lookup_s=lookup_s, loading=loading, **_loaded(loader))

    @staticmethod
    def _planned(
        pieces: PromptPieces, keys: Sequence[ChunkKey], placements: Sequence[Placement | None], *, reuse: bool
    ) -> tuple[PlannedSegment, ...]:
        """The prompt's segments; without `reuse` what is stored was not used: neither a hit nor a miss."""
        planned = list(_fresh(pieces.head))
        if reuse:
            planned = [replace(head, kind="exact", tier="memory") for head in planned]
        for chunk, key, placement in zip(pieces.chunks, keys, placements, strict=True):
            if placement is None:
                planned.append(PlannedSegment(kind="fresh", token_ids=chunk, key=str(key)))
            elif reuse:
                planned.append(PlannedSegment(kind="reused", token_ids=chunk, key=str(key), tier=placement.tier))
            else:
                planned += _fresh(chunk)
        return (*planned, *_fresh(pieces.tail))

    def _plan_loading(self, pieces: PromptPieces, placements: Sequence[Placement | None]) -> LoadingPlan:
        layers = self._fusor.decoder.geometry.layers
        layer_bytes: Counter[str] = Counter()
        reusable, fresh = 0, len(pieces.tail)
        for chunk, placement in zip(pieces.chunks, placements, strict=True):
            if placement is None:
                fresh += len(chunk)
            else:
                reusable += len(chunk)
                layer_bytes[placement.tier] += placement.layer_bytes(layers - 1)
        return self._controller.plan(layer_bytes, reusable, fresh, layers)


def _loaded(loader: LayerLoader) -> dict[str, Any]:
    return {"load_s": loader.load_s, "loaded_bytes": dict(loader.bytes_by_tier)}


def _fresh(*pieces: tuple[int, ...]) -> tuple[PlannedSegment, ...]:
    return tuple(PlannedSegment(kind="fresh", token_ids=token_ids) for token_ids in pieces if token_ids)
