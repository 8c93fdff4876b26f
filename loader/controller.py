"""The loading controller: the recompute ratio that is hidden by the loading (paper §5.1), corrected by measured requests."""

import logging
import math
import statistics
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cacheblend.blend import Schedule

from .config import LoaderConfig
from .estimators import Pipeline, Read, RecomputeEstimator, load_seconds
from .profile import Profile

logger = logging.getLogger(__name__)
WINDOW = 8  # requests of a calibration's median
STEP = 1.1  # a calibration moves by more than this factor, or not at all
MAX_CORRECTION = 16.0  # the largest factor of a calibration, and the inverse of the smallest
DELAY_ALLOWED = 0.05  # share of the prefill at r*: the last layer's own recompute is hidden by nothing
RATIO_STEP = 1000  # ratios are multiples of 1/1000, so that equal requests get equal ratios despite noise


class TimeCalibration:
    """A factor on predicted seconds. It moves if the median of the last `WINDOW` requests is off by more than `STEP`.

    Between two moves all requests have one factor, and one slow request moves nothing. Only the observations and their order
    decide.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen: list[float] = []

    def observe(self, predicted_s: float, real_s: float) -> bool:
        """Note a request's seconds beside the uncalibrated prediction; True if the factor moved."""
        if predicted_s <= 0 or real_s <= 0:
            return False
        self._seen = [*self._seen[-(WINDOW - 1) :], real_s / predicted_s]
        if len(self._seen) < WINDOW:
            return False
        median = min(max(statistics.median(self._seen), 1 / MAX_CORRECTION), MAX_CORRECTION)
        if 1 / STEP <= median / self.factor <= STEP:
            return False
        self.factor, self._seen = median, []
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPlan:
    """The controller's choice for a request, and its predictions: seconds of the request, to the first logits.

    Full recompute is chosen if it is predicted to be faster than blending, or no more than `DELAY_ALLOWED` slower than a blend
    that waits for its loading.
    """

    ratio: float
    load_s: float  # loading without computing
    load_s_by_tier: dict[str, float]
    recompute_s: float  # the blend at `ratio` with all KV loaded
    prefill_s: float  # the chosen way, loading beside computing
    full_s: float
    full_recompute: bool


@dataclass(frozen=True, slots=True)
class _Request:
    tokens: tuple[int, int, int]  # reusable, fresh and exact ones
    by_tier: dict[str, float]  # seconds of a layer
    copy_layer_s: float  # the fusor's own copies
    lookahead_layers: int


class LoadingController:
    """Ratio = max(r*, the ratio at which loading just hides the recompute); full recompute if that is as fast.

    Measured seconds of requests correct the profile, by one `TimeCalibration` for computing and one for each tier. Thread-safe.

    Args:
        config: r* and the look-ahead.
        profile: measurements of the model on this device.
        schedule: the selector's schedule (`FusionConfig.schedule`).
        copied_tiers: tiers whose KV the fusor copies itself, between two layers: on a CPU what is in RAM.
    """

    def __init__(self, config: LoaderConfig, profile: Profile, schedule: Schedule, copied_tiers: Collection[str]) -> None:
        self.config, self.profile, self._copied_tiers = config, profile, copied_tiers
        self._recompute = RecomputeEstimator(profile, schedule)
        self._lock = threading.Lock()
        self._compute = TimeCalibration()
        self._tiers: defaultdict[str, TimeCalibration] = defaultdict(TimeCalibration)

    def plan(self, reads: Sequence[Read], reusable: int, fresh: int, exact: int = 0) -> LoadingPlan:
        """Choose the ratio of one request.

        Args:
            reads: tier and bytes of each read of one layer.
            reusable: tokens with stored KV that the ratio counts.
            fresh: tokens without.
            exact: tokens of exact segments.
        """
        tokens = reusable + fresh + exact
        by_tier = {tier: tier_s * self._tiers[tier].factor for tier, tier_s in load_seconds(reads, self.profile.tiers).items()}
        copy_s = sum(tier_s for tier, tier_s in by_tier.items() if tier in self._copied_tiers)
        lookahead = self.config.lookahead_layers(tokens * self.profile.layer_token_bytes)
        full_s, request = self.full_s(tokens), _Request((reusable, fresh, exact), by_tier, copy_s, lookahead)
        ratio = self._hiding_ratio(request, full_s)
        blend = self._pipeline(request, ratio)
        # If loading is not hidden, the exact answer may cost as much more as a higher ratio.
        limit_s = blend.total_s * (1 + DELAY_ALLOWED) if blend.waits_for_last else blend.total_s
        full_recompute = bool(reusable) and full_s < limit_s
        steps = self._steps(request, ratio)
        loaded_layers = sum(is_read for _, is_read in steps)
        return LoadingPlan(
            ratio=ratio,
            load_s=sum(by_tier.values()) * loaded_layers,
            load_s_by_tier={tier: tier_s * loaded_layers for tier, tier_s in by_tier.items()},
            recompute_s=sum(step_s for step_s, _ in steps),
            prefill_s=full_s if full_recompute else blend.total_s,
            full_s=full_s,
            full_recompute=full_recompute,
        )

    def full_s(self, tokens: int) -> float:
        """Predicted seconds of a full prefill."""
        return self._recompute.prefill_s(tokens) * self._compute.factor

    def record(self, plan: LoadingPlan, *, load_s: float, compute_s: float | None) -> None:
        """Correct the predictions by a request's measured seconds, once its prefill is done.

        A tier is corrected if all reads were from it. A full recompute reads nothing: then the tiers' corrections fade request
        by request, so that a disk that was slow for a while is tried again.

        Args:
            plan: the predictions.
            load_s: seconds in which reads were under way.
            compute_s: seconds of computing without waits for KV; None if the clock cannot separate them.
        """
        with self._lock:
            expected_s = plan.full_s if plan.full_recompute else plan.recompute_s
            moved = compute_s is not None and self._compute.observe(expected_s / self._compute.factor, compute_s)
            if plan.full_recompute or len(plan.load_s_by_tier) == 1:
                for tier, tier_s in plan.load_s_by_tier.items():
                    correction = self._tiers[tier]
                    measured_s = tier_s / correction.factor
                    moved |= correction.observe(measured_s, measured_s if plan.full_recompute else load_s)
            if moved:
                factors = {"compute": self._compute.factor, **{tier: seen.factor for tier, seen in dict(self._tiers).items()}}
                logger.info("predictions are corrected by %s", {name: round(factor, 3) for name, factor in factors.items()})

    def _hiding_ratio(self, request: _Request, full_s: float) -> float:
        """The largest ratio, from r* on, at which the fusor waits for loading and TTFT is about that of r*."""
        quality = self.config.quality_ratio
        at_quality = self._pipeline(request, quality)
        if not request.tokens[0] or not at_quality.waits_for_last:
            return quality
        limit_s = max(min(at_quality.total_s * (1 + DELAY_ALLOWED), full_s), at_quality.total_s)

        def hides(ratio: float) -> bool:
            pipeline = self._pipeline(request, ratio)
            return pipeline.waits_for_last and pipeline.total_s <= limit_s

        steps = range(math.ceil(quality * RATIO_STEP), RATIO_STEP + 1)
        hiding = bisect_left(steps, True, key=lambda step: not hides(step / RATIO_STEP))  # how many of the steps hide
        return max(steps[hiding - 1] / RATIO_STEP, quality) if hiding else quality  # which is no multiple

    def _pipeline(self, request: _Request, ratio: float) -> Pipeline:
        """The steps on one clock."""
        steps = self._steps(request, ratio)
        load_layer_s = sum(request.by_tier.values()) - request.copy_layer_s
        load_s = [load_layer_s * is_read for _, is_read in steps]
        busy_s = [step_s + request.copy_layer_s * is_read for step_s, is_read in steps]
        return Pipeline.from_layers(load_s, busy_s, request.lookahead_layers)

    def _steps(self, request: _Request, ratio: float) -> list[tuple[float, bool]]:
        steps = self._recompute.steps(ratio, *request.tokens)
        return [(step_s * self._compute.factor, is_read) for step_s, is_read in steps]
