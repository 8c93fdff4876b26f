"""Prediction of what a recompute ratio costs and loses, before a question is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheblend.blend import DEFAULT_SELECTOR, Fusor
from cacheblend.blend.models import KNOWN_MODELS
from cacheblend.store.codecs import CODECS, LayerShape

from .config import EngineConfig
from .profiles import context_name

if TYPE_CHECKING:
    from cacheblend.loader import Calibration, LoadingController, WorkEstimator

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0)
QUESTION_TOKENS = 32
BENCHMARK = "on SQuAD passages"  # docs/benchmarks.md
# First-token KL in nats by ratio, of the default selector and context: docs/figures/loss_ttft.csv.
KNOWN_LOSSES: dict[str, dict[float, float]] = {
    "smollm2-135m": {0.0: 0.0837, 0.05: 0.0245, 0.1: 0.0192, 0.14: 0.017, 0.2: 0.0126, 0.3: 0.0090, 0.5: 0.0047},
    "gemma3-270m": {0.0: 0.0463, 0.05: 0.0286, 0.1: 0.0206, 0.14: 0.0155, 0.2: 0.0139, 0.3: 0.0106, 0.5: 0.0052},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """A ratio and the mean KL of the first token's distribution from full recompute's, in nats."""

    ratio: float
    first_token_kl_nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Loss of blending by ratio.

    Args:
        about: what it was measured on, in words.
        points: by rising ratio, up to ratio 1, which loses nothing.
    """

    about: str
    points: tuple[LossPoint, ...]

    @classmethod
    def of(cls, about: str, points: Sequence[tuple[float, float]]) -> LossCurve:
        """The curve through measured ratios, rising, each with its KL."""
        ends = (*(point for point in points if point[0] < 1), (1.0, 0.0))
        return cls(about=about, points=tuple(LossPoint(ratio=ratio, first_token_kl_nats=kl_nats) for ratio, kl_nats in ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoint:
    """Cost of a ratio.

    Args:
        ratio: recompute ratio, 0..1.
        work_share: estimated work between question and first token over a full prefill's.
        prefill_s: predicted seconds of it, loading included; None without a profile.
    """

    ratio: float
    work_share: float
    prefill_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Costs and losses of the ratios.

    Args:
        recompute_ratio: that a request runs at which names none, unless its loading takes longer.
        prompt_tokens: of the prompt that the costs are of.
        costs: by rising ratio.
        loss: None where nobody has measured it for the model.
    """

    recompute_ratio: float
    prompt_tokens: int
    costs: tuple[CostPoint, ...]
    loss: LossCurve | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def find_loss(config: EngineConfig, calibration: Calibration | None) -> LossCurve | None:
    """The loss by ratio: the calibration's, else a known model's, where it is of the engine's context and selector.

    Both are of raw KV, after the filler that "auto" stands for or none: of another codec or filler nobody has measured it.

    Args:
        config: the engine's, with the calibration's settings in it.
        calibration: that stands beside the store.
    """
    if config.kv_cache_dtype != "raw" or config.context_filler not in ("auto", "none"):
        return None
    context, selector = context_name(config), config.fusion.selector or DEFAULT_SELECTOR
    if calibration is not None and calibration.curve and (calibration.context, calibration.selector) == (context, selector):
        return LossCurve.of(f"on {calibration.measures.cases} questions by `cacheblend calibrate`", calibration.curve)
    known = next((name for name, model in KNOWN_MODELS.items() if config.model in (name, str(model.folder))), None)
    if known is None or context != "default" or selector != DEFAULT_SELECTOR:
        return None
    return LossCurve.of(f"with {known} {BENCHMARK}", tuple(KNOWN_LOSSES[known].items())) if known in KNOWN_LOSSES else None


def predict_costs(
    config: EngineConfig,
    fusor: Fusor,
    work: WorkEstimator,
    controller: LoadingController | None,
    *,
    prefix_tokens: int,
    chunks: int,
    tier: str,
) -> tuple[int, tuple[CostPoint, ...]]:
    """Predict a prompt of whole chunks that are all stored.

    Args:
        config: chunk size and codec.
        fusor: the model.
        work: counts the rows.
        controller: predicts the seconds; None without a profile.
        prefix_tokens: that every prompt begins with, whose KV is there.
        chunks: in the prompt.
        tier: where their KV is read from.

    Returns:
        Tokens of the prompt, and the costs by rising ratio.
    """
    chunk_tokens, geometry = config.retriever.chunk_tokens, fusor.decoder.geometry
    reusable, fresh = chunks * chunk_tokens, QUESTION_TOKENS
    shape = LayerShape(geometry.kv_heads, chunk_tokens, geometry.head_dim, geometry.dtype)
    reads = [(tier, CODECS[config.kv_cache_dtype].encoded_shape(shape).nbytes)] * chunks

    def cost(ratio: float) -> CostPoint:
        seconds = None if controller is None else controller.predict_s(ratio, reads, reusable, fresh, prefix_tokens)
        share = 1.0 if ratio >= 1 else work.share(ratio, reusable, fresh, prefix_tokens)
        return CostPoint(ratio=ratio, work_share=share, prefill_s=seconds)

    return prefix_tokens + reusable + fresh, tuple(map(cost, RATIOS))
