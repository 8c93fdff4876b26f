"""The loading controller: the recompute ratio that hides behind the loading (paper §5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import LoaderConfig
from .estimators import LoadEstimator, RecomputeEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPlan:
    """What the controller chose for a request, and what it expects. Seconds are of one layer.

    Args:
        ratio: the recompute ratio.
        load_layer_s: loading of one layer.
        recompute_layer_s: recompute of one layer at `ratio`.
        prefill_layer_s: one layer's full prefill.
        full_recompute: blending is predicted to take longer than full prefill.
    """

    ratio: float
    load_layer_s: float
    recompute_layer_s: float
    prefill_layer_s: float
    full_recompute: bool


class LoadingController:
    """Ratio = max(r*, the ratio at which recompute just hides behind loading); full recompute where that is faster.

    Args:
        config: r* and the cap.
        load: estimates a layer's loading.
        recompute: estimates a layer's recompute.
    """

    def __init__(self, config: LoaderConfig, load: LoadEstimator, recompute: RecomputeEstimator) -> None:
        self.config, self.load, self.recompute = config, load, recompute

    def plan(self, layer_bytes: Mapping[str, int], reusable: int, fresh: int, layers: int) -> LoadingPlan:
        """Choose the ratio of one request.

        Args:
            layer_bytes: bytes of one layer of the stored chunks, by tier.
            reusable: tokens with stored KV.
            fresh: tokens without.
            layers: layers of the model; layer 0 runs whole, and is not loaded.
        """
        load_s = self.load.layer_s(layer_bytes)
        prefill_s = self.recompute.prefill_layer_s(reusable + fresh)
        ratio = self.config.quality_ratio
        if reusable and prefill_s > 0:
            hides = (load_s / prefill_s * (reusable + fresh) - fresh) / reusable
            ratio = min(max(ratio, hides), self.config.max_ratio)
        recompute_s = self.recompute.layer_s(ratio, reusable, fresh) if reusable else prefill_s
        # Both ways run layer 0 whole. Each later layer of a blend takes the longer of the two; recompute never exceeds prefill.
        return LoadingPlan(
            ratio=ratio,
            load_layer_s=load_s,
            recompute_layer_s=recompute_s,
            prefill_layer_s=prefill_s,
            full_recompute=layers > 1 and load_s > prefill_s,
        )
