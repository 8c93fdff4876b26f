"""The plan of a blend: which stored KV a prompt reuses, at which recompute ratio, or a full recompute.

`plan_blend` is pure: what a look-up found goes in, the plan comes out. The engine's prefill and vLLM's worker follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from cacheblend.blend.prompt import Segment, alike_chunks
from cacheblend.blend.widening import WIDE_RATIO

if TYPE_CHECKING:
    from cacheblend.loader import LoadingController, LoadingPlan, WorkEstimator
    from cacheblend.store import KVHandle

    from .prompt import PromptChunk, PromptTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSegment:
    """One segment of a prompt as it was run.

    Args:
        kind: "exact" (a cached prefix), "reused" (blended or reused chunk KV) or "fresh" (computed in the prompt).
        token_ids: its token ids.
        key: hex of the store's key, or with "prefix_cache" the hash of a block; None where nothing is looked up.
        tier: a tier of the store ("ram", "nvme"), "memory" (held by the engine), or None for what was computed now.
        earlier: the chunks of its document that a chunk's KV is computed after.
    """

    kind: str
    token_ids: tuple[int, ...] = field(repr=False)
    key: str | None = None
    tier: str | None = None
    earlier: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class BlendSegment(Segment):
    """One segment of a prompt, and what its record needs; `key` and `earlier` are `PlannedSegment`'s."""

    key: str | None = None
    earlier: tuple[tuple[int, ...], ...] = ()

    @property
    def record(self) -> PlannedSegment:
        """The segment as the answer's plan names it."""
        kind = "fresh" if self.kv is None else "exact" if self.exact else "reused"
        tier = None if self.kv is None else self.kv.tier
        return PlannedSegment(kind=kind, token_ids=tuple(self.token_ids), key=self.key, tier=tier, earlier=self.earlier)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPolicy:
    """How the recompute ratio of a blend is chosen.

    Args:
        ratio: the ratio that the request asks for; None leaves it to the controller. Without one, and where the blend may be
            widened, chunks that look alike are computed.
        quality_ratio: r*, for requests that ask for none where there is no controller.
        controller: picks the ratio from a profile; None without a profile.
        work: decides on full recompute where there is no controller; None for never.
        widens: the blend may be widened. Its first round counts what stands between chunks, and runs in any case, up to half
            of what it recomputes: an application's own words around passages.
    """

    ratio: float | None
    quality_ratio: float
    controller: LoadingController | None = None
    work: WorkEstimator | None = None
    widens: bool = False

    def choose(self, used: Sequence[KVHandle], reusable: int, fresh: int, exact: int) -> tuple[float, bool, LoadingPlan | None]:
        """The ratio, whether full recompute is as fast, and the controller's prediction where it was asked.

        `used` is the stored KV that a blend would load; the others are numbers of tokens.
        """
        if self.ratio is not None:
            return self.ratio, False, None
        if self.controller is not None:
            reads = [(kv.tier, kv.layer_bytes(kv.num_layers - 1)) for kv in used]
            loading = self.controller.plan(reads=reads, reusable=reusable, fresh=fresh, exact=exact)
            return loading.ratio, loading.full_recompute, loading
        full = self.work is not None and self.work.is_short(self.quality_ratio, reusable, fresh, exact)
        return self.quality_ratio, full, None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlendPlan:
    """What is done for one prompt.

    Args:
        segments: the prompt, in order, without empty segments.
        ratio: the recompute ratio; without effect on a full recompute.
        full_recompute: every token is computed, and no stored KV is read.
        misses: chunks whose KV is not stored.
        predicted: the loading controller's prediction; None where it was not asked.
        look_alike: how many chunks are computed, since they look alike.
    """

    segments: tuple[BlendSegment, ...]
    ratio: float
    full_recompute: bool
    misses: tuple[PromptChunk, ...]
    predicted: LoadingPlan | None
    look_alike: int

    @property
    def exact_tokens(self) -> int | None:
        """How many of the first tokens get KV that is full prefill's own; None for all of them."""
        starts = accumulate((len(segment.token_ids) for segment in self.segments), initial=0)
        reused = (start for start, one in zip(starts, self.segments, strict=False) if one.kv is not None and not one.exact)
        return next(reused, None)


def plan_blend(
    prompt: PromptTokens, prefix: BlendSegment | None, stored: Sequence[KVHandle | None], policy: BlendPolicy
) -> BlendPlan:
    """Plan one prompt's prefill from what was found.

    Args:
        prompt: its tokens and chunks.
        prefix: the longest KV at hand that it begins with; None for none.
        stored: the stored KV of each of its chunks; None for a miss.
        policy: how the ratio is chosen.
    """
    # 1. The chunks whose KV is not used, as they look alike. Then the ratio, and whether full recompute is as fast.
    alike = [False] * len(prompt.chunks)
    if policy.widens or policy.ratio is None:
        alike = alike_chunks([() if chunk.key is None else chunk.stored_ids or chunk.token_ids for chunk in prompt.chunks])
    used = [kv for kv, is_alike in zip(stored, alike, strict=True) if kv is not None and not is_alike]
    reusable = sum(len(kv.token_ids) for kv in used)
    exact = 0 if prefix is None else len(prefix.token_ids)
    ratio, full, predicted = policy.choose(used, reusable, len(prompt) - reusable - exact, exact)
    if policy.widens and reusable and ratio < WIDE_RATIO:
        between = sum(len(chunk.token_ids) for chunk in prompt.chunks if chunk.key is None)
        ratio = max(ratio / 2, ratio - between / reusable)
    # 2. The segments: the exact prefix, the chunks with their KV, and what stands before, between and after them.
    prefix, exact = (None, 0) if full else (prefix, exact)
    before, after = prompt.prefix[exact:], prompt.suffix[max(0, exact - len(prompt.prefix)) :]
    placed = list(zip(prompt.chunks, stored, alike, strict=True))
    parts = [_chunk_segment(chunk, kv, full=full or is_alike) for chunk, kv, is_alike in placed]
    segments = [*([] if prefix is None else [prefix]), BlendSegment(before), *parts, BlendSegment(after)]
    # 3. The misses, whose KV is computed and stored afterwards.
    misses = [chunk for chunk, kv, is_alike in placed if kv is None and chunk.key is not None and not is_alike]
    filled = tuple(segment for segment in segments if segment.token_ids)
    return BlendPlan(
        segments=filled, ratio=ratio, full_recompute=full, misses=tuple(misses), predicted=predicted, look_alike=sum(alike)
    )


def fresh_records(prompt: PromptTokens, tokens: int = 0) -> list[PlannedSegment]:
    """Records of a prompt whose tokens after the first `tokens` are computed, whatever is stored."""
    records: list[PlannedSegment] = []
    for part in (prompt.prefix, *prompt.chunk_ids, prompt.suffix):
        if part[tokens:]:
            records.append(PlannedSegment(kind="fresh", token_ids=part[tokens:]))
        tokens = max(0, tokens - len(part))
    return records


def _chunk_segment(chunk: PromptChunk, kv: KVHandle | None, *, full: bool) -> BlendSegment:
    """A chunk's segment. Stored KV that is not used is neither a hit nor a miss, and has no key."""
    key = None if chunk.key is None or (full and kv is not None) else str(chunk.key)
    return BlendSegment(chunk.token_ids, None if full else kv, key=key, earlier=chunk.earlier)
