"""The loading controller: the recompute ratio that hides behind the loading (paper §5.1), and what it learns from requests."""

from __future__ import annotations

import bisect
import logging
import math
import statistics
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cacheblend.store.tiers import REMOTE

from .estimators import LoadEstimator, Pipeline, RecomputeEstimator

if TYPE_CHECKING:
    from cacheblend.blend import Schedule

    from .estimators import Read
    from .layer_loader import LoaderConfig
    from .profile import Profile, TierSpeed

WINDOW = 8  # requests
STEP = 1.1
MOST = 16.0


class Correction:
    """A factor on predicted seconds that moves only where the median of several requests says so.

    It is the same for all requests between two moves. It moves when the median of the last `WINDOW` requests is off by more
    than `STEP`, and nothing but the order of what was seen decides. One slow request moves nothing.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen: list[float] = []

    def observe(self, predicted_s: float, real_s: float) -> bool:
        """Note a request's seconds beside the uncorrected prediction; True where the factor moved."""
        if predicted_s <= 0 or real_s <= 0:
            return False
        self._seen = [*self._seen[-(WINDOW - 1) :], real_s / predicted_s]
        if len(self._seen) < WINDOW:
            return False
        median = min(max(statistics.median(self._seen), 1 / MOST), MOST)
        if 1 / STEP <= median / self.factor <= STEP:
            return False
        self.factor, self._seen = median, []
        return True


logger = logging.getLogger(__name__)
DELAY_ALLOWED = 0.05  # of the prefill at r*: a higher ratio costs at least its own share of the last layer, which nothing hides
WORTH_A_FRONT = 0.02  # of a prefill's seconds, that computing a front must save: what is loaded costs no energy
SLOWER = 1 + 1e-9  # more than float rounding
RATIO_STEP = 1000  # ratios are whole thousandths, so that noise in the last digits does not tell equal requests apart


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPlan:
    """Choice of the controller for a request, and what it expects. Seconds are of the whole request, to the first logits.

    Args:
        ratio: the recompute ratio.
        load_s: the loading without the compute.
        load_s_by_tier: the same by tier.
        recompute_s: the blend at `ratio` with all KV there already.
        prefill_s: the way that was chosen, loading beside computing, chunks precomputed first included.
        precompute_s: the missing chunks that are precomputed first.
        full_s: full prefill.
        latency_s: of the loading, those before its first bytes.
        front_chunks: of the prompt's first chunks so many are computed exactly while the KV of the others comes.
        front_s: what that takes; in `recompute_s`.
        full_recompute: full prefill is predicted to be faster than blending, or no more than `DELAY_ALLOWED` slower than one
            that waits for its loading, so that is what was chosen.
    """

    ratio: float
    load_s: float
    load_s_by_tier: dict[str, float]
    recompute_s: float
    prefill_s: float
    precompute_s: float
    full_s: float
    full_recompute: bool
    latency_s: float = 0.0
    front_chunks: int = 0
    front_s: float = 0.0


class FrontChunk(NamedTuple):
    """A chunk that may be computed exactly before the blend: its tokens, and the read of its layer; None for a miss."""

    tokens: int
    read: Read | None


@dataclass(frozen=True, slots=True)
class _Request:
    front_s: float  # of computing before the blend, beside the loading
    load_layer_s: float
    reusable: int
    fresh: int
    exact: int
    lookahead_layers: int
    copy_layer_s: float  # of what the fusor brings itself
    latency_s: float
    by_tier: dict[str, float]  # seconds of a layer


class LoadingController:
    """Ratio = max(r*, the ratio at which recompute just hides behind loading); full recompute where that is as fast.

    What requests really took corrects the profile, by one factor for computing and one for each tier; see `Correction`.
    Thread-safe.

    Args:
        config: r*, the cap and the look-ahead.
        profile: of the model on this device.
        schedule: that the selector follows; see `FusionConfig.schedule`.
        copied_tiers: whose KV the fusor brings itself, between two layers and not beside them; see `copied_tiers`.
    """

    def __init__(self, config: LoaderConfig, profile: Profile, schedule: Schedule, copied_tiers: Collection[str]) -> None:
        self.config, self.profile, self._copied_tiers = config, profile, copied_tiers
        self._load = LoadEstimator(profile.tiers)
        self._recompute = RecomputeEstimator(profile, schedule)
        self._lock = threading.Lock()
        self._compute = Correction()
        self._tiers = {tier: Correction() for tier in profile.tiers if tier != REMOTE}  # which is measured all the time

    def plan(
        self,
        reads: Sequence[Read],
        reusable: int,
        fresh: int,
        exact: int = 0,
        precomputed: Sequence[int] = (),
        *,
        front: Sequence[FrontChunk] = (),
        remote_speed: TierSpeed | None = None,
    ) -> LoadingPlan:
        """Choose the ratio of one request, and how many of its first chunks are computed while the others' KV comes.

        Args:
            reads: tier and bytes of each read of one layer.
            reusable: tokens with stored KV that the ratio counts.
            fresh: tokens without.
            exact: tokens of exact segments.
            precomputed: tokens of each of those reusable chunks whose KV is missing and precomputed first.
            front: the prompt's chunks from its first on, as far as they may be computed exactly before the blend.
            remote_speed: as measured last; None for the profile's.
        """
        measured = {} if remote_speed is None else {REMOTE: remote_speed}
        full_s = self.full_s(reusable + fresh + exact)

        def request_of(count: int) -> _Request:
            computed = front[:count]
            left = list(reads)
            for chunk in computed:
                if chunk.read is not None:
                    left.remove(chunk.read)
            return self._request(
                left,
                measured,
                reusable=reusable - sum(chunk.tokens for chunk in computed if chunk.read is not None),
                fresh=fresh - sum(chunk.tokens for chunk in computed if chunk.read is None),
                exact=exact + sum(chunk.tokens for chunk in computed),
                front_s=self._front_s(sum(chunk.tokens for chunk in computed), exact),
            )

        front_chunks = self._front_chunks(front, request_of)
        request = request_of(front_chunks)
        by_tier, reusable = request.by_tier, request.reusable
        ratio = self._hiding_ratio(request, full_s)
        blend = self._pipeline(request, ratio)
        precompute_s = sum(map(self._recompute.prefill_s, precomputed)) * self._compute.factor
        blend_s = blend.total_s + precompute_s
        # Beside loading that nothing hides, the exact answer may cost what a higher ratio may.
        most_s = blend_s * (1 + DELAY_ALLOWED) if blend.waits_for_last else blend_s
        full_recompute = bool(reusable) and full_s < most_s
        loaded_layers = sum(is_read for _, is_read in self._steps(request, ratio))
        return LoadingPlan(
            ratio=ratio,
            load_s=request.latency_s + sum(by_tier.values()) * loaded_layers,
            load_s_by_tier={tier: took_s * loaded_layers for tier, took_s in by_tier.items()},
            recompute_s=request.front_s + sum(step_s for step_s, _ in self._steps(request, ratio)),
            prefill_s=full_s if full_recompute else blend_s,
            precompute_s=precompute_s,
            full_s=full_s,
            full_recompute=full_recompute,
            latency_s=request.latency_s,
            front_chunks=front_chunks,
            front_s=request.front_s,
        )

    def full_s(self, tokens: int) -> float:
        """Predicted seconds of a full prefill."""
        return self._recompute.prefill_s(tokens) * self._compute.factor

    def predict_s(self, ratio: float, reads: Sequence[Read], reusable: int, fresh: int, exact: int = 0) -> float:
        """Seconds of a prefill at a ratio that is asked for; 1 is full recompute. Other arguments as of `plan`."""
        if ratio >= 1:
            return self.full_s(reusable + fresh + exact)
        return self._pipeline(self._request(reads, {}, reusable=reusable, fresh=fresh, exact=exact), ratio).total_s

    def record(self, plan: LoadingPlan, *, load_s: float, compute_s: float | None) -> None:
        """Correct the model by what a request took, once its prefill is done.

        A tier is corrected where all reads were from it (what was computed first is copied as well, from no tier). A full
        recompute reads nothing; then what the tiers were corrected by is forgotten request by request, so that a disk that was
        slow for a while is tried again.

        Args:
            plan: what was expected.
            load_s: seconds in which reads were under way.
            compute_s: seconds of computing, waits for KV apart; None where the clock does not tell them apart.
        """
        with self._lock:
            expected_s = plan.full_s if plan.full_recompute else plan.recompute_s
            moved = compute_s is not None and self._compute.observe(expected_s / self._compute.factor, compute_s)
            if plan.full_recompute or (len(plan.load_s_by_tier) == 1 and not plan.precompute_s):
                for tier, tier_s in plan.load_s_by_tier.items():
                    if tier == REMOTE:  # measured all the time
                        continue
                    correction = self._tiers.setdefault(tier, Correction())
                    measured_s = tier_s / correction.factor
                    moved |= correction.observe(measured_s, measured_s if plan.full_recompute else load_s)
            if moved:
                factors = {"compute": self._compute.factor, **{tier: seen.factor for tier, seen in self._tiers.items()}}
                logger.info("predictions are corrected by %s", {name: round(factor, 3) for name, factor in factors.items()})

    def _request(
        self,
        reads: Sequence[Read],
        measured: Mapping[str, TierSpeed],
        *,
        reusable: int,
        fresh: int,
        exact: int,
        front_s: float = 0,
    ) -> _Request:
        """The inputs of a request's pipeline; `measured` are speeds that come before the profile's."""
        by_tier = {tier: took_s * self._factor(tier) for tier, took_s in self._load.seconds(reads, measured).items()}
        copy_s = sum(took_s for tier, took_s in by_tier.items() if tier in self._copied_tiers)
        return _Request(
            front_s=front_s,
            load_layer_s=sum(by_tier.values()) - copy_s,
            reusable=reusable,
            fresh=fresh,
            exact=exact,
            lookahead_layers=self.config.lookahead_layers((reusable + fresh + exact) * self.profile.layer_token_bytes),
            copy_layer_s=copy_s,
            latency_s=self._load.latency_s(reads, measured),
            by_tier=by_tier,
        )

    def _factor(self, tier: str) -> float:
        """The correction of a tier; 1 for one that neither the profile nor a request has measured."""
        correction = self._tiers.get(tier)
        return 1.0 if correction is None else correction.factor

    def _front_s(self, tokens: int, exact: int) -> float:
        """Seconds of an exact prefill of so many tokens that stand after exact ones."""
        if not tokens:
            return 0.0
        after_s = self._recompute.prefill_s(exact) - self._recompute.prefill_s(0)
        return (self._recompute.prefill_s(exact + tokens) - after_s) * self._compute.factor

    def _front_chunks(self, front: Sequence[FrontChunk], request_of: Callable[[int], _Request]) -> int:
        """Number of chunks to compute beside the loading: as many as make the prefill shortest.

        Every one of them shortens the loading and lengthens the computing, so the prefill gets shorter up to where both end
        together, and longer after that. One stored chunk at least is left to be loaded: without it all is full recompute.
        """
        stored = [at for at, chunk in enumerate(front) if chunk.read is not None]
        if not stored:
            return 0
        quality = self.config.quality_ratio
        seconds: dict[int, float] = {}

        def took_s(count: int) -> float:
            if count not in seconds:
                seconds[count] = self._pipeline(request_of(count), quality).total_s
            return seconds[count]

        computing_s = sum(step_s for step_s, _ in self._steps(request_of(0), quality))
        if took_s(0) - computing_s < WORTH_A_FRONT * took_s(0):
            return 0  # nothing to gain: the loading is hidden as it is
        # Where a chunk of a fast tier hides behind the loading of a slow one, it changes nothing, and the search goes on.
        count = bisect.bisect_left(range(stored[-1]), x=True, key=lambda count: took_s(count + 1) > took_s(count) * SLOWER)
        return count if took_s(count) <= took_s(0) * (1 - WORTH_A_FRONT) else 0

    def _hiding_ratio(self, request: _Request, full_s: float) -> float:
        """The largest ratio, from r* to the cap, at which loading is still the longer side and TTFT that of r*."""
        quality = self.config.quality_ratio
        at_quality = self._pipeline(request, quality)
        if not request.reusable or not at_quality.waits_for_last:
            return quality
        most_s = max(min(at_quality.total_s * (1 + DELAY_ALLOWED), full_s), at_quality.total_s)

        def hides(ratio: float) -> bool:
            pipeline = self._pipeline(request, ratio)
            return pipeline.waits_for_last and pipeline.total_s <= most_s

        lowest, highest = math.ceil(quality * RATIO_STEP), math.floor(self.config.max_ratio * RATIO_STEP)
        while lowest < highest:
            middle = (lowest + highest + 1) // 2
            lowest, highest = (middle, highest) if hides(middle / RATIO_STEP) else (lowest, middle - 1)
        found = lowest / RATIO_STEP
        return found if quality <= found <= self.config.max_ratio and hides(found) else quality

    def _pipeline(self, request: _Request, ratio: float) -> Pipeline:
        """The steps on one clock."""
        steps = self._steps(request, ratio)
        load_s = [request.load_layer_s * is_read for _, is_read in steps]
        first = next((at for at, (_, is_read) in enumerate(steps) if is_read), None)
        if first is not None:
            load_s[first] += request.latency_s
        busy_s = [step_s + request.copy_layer_s * is_read for step_s, is_read in steps]
        return Pipeline.of(load_s, busy_s, request.lookahead_layers, request.front_s)

    def _steps(self, request: _Request, ratio: float) -> list[tuple[float, bool]]:
        steps = self._recompute.steps(ratio, request.reusable, request.fresh, request.exact)
        return [(step_s * self._compute.factor, is_read) for step_s, is_read in steps]
