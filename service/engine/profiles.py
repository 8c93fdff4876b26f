"""Profile and calibration beside a store: the loading controller made from the one, r* and selector from the other; and what
they predict that a recompute ratio costs and loses, before a question is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cacheblend.base.errors import ProfileError
from cacheblend.blend import DEFAULT_SELECTOR, Fusor
from cacheblend.blend.models import KNOWN_MODELS
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.loader import (
    Calibration,
    LoaderConfig,
    LoadingController,
    Profile,
    copied_tiers,
    describe_device,
    read_calibration,
    read_profile,
)
from cacheblend.loader.profile import prefix_digest
from cacheblend.store.codecs import CODECS, LayerShape

from .blend_plan import BlendCounts, BlendPolicy
from .config import EngineConfig

logger = logging.getLogger(__name__)
# Contexts of chunks' KV that an engine can have, by `cacheblend eval`'s names: filler passages, and a document's window.
CONTEXT_OPTIONS = {
    "default": ("auto", DOCUMENT_TOKENS),
    "filler": ("auto", 0),
    "document": ("none", DOCUMENT_TOKENS),
    "head": ("none", 0),
}
RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0)
QUESTION_TOKENS = 32
BENCHMARK = "on SQuAD passages"  # docs/benchmarks.md
# First-token KL in nats by ratio, of the default selector and context: docs/figures/loss_ttft.csv.
KNOWN_LOSSES: dict[str, dict[float, float]] = {
    "smollm2-135m": {0.0: 0.0837, 0.05: 0.0245, 0.1: 0.0192, 0.14: 0.017, 0.2: 0.0126, 0.3: 0.0090, 0.5: 0.0047},
    "gemma3-270m": {0.0: 0.0463, 0.05: 0.0286, 0.1: 0.0206, 0.14: 0.0155, 0.2: 0.0139, 0.3: 0.0106, 0.5: 0.0052},
}


def find_profile(config: EngineConfig, fusor: Fusor) -> Profile | None:
    """The profile of the model on its device that stands beside the store; None where none was made.

    Raises:
        ProfileError: it is damaged.
    """
    return read_profile(config.profile_dir, model=fusor.fingerprint, device=describe_device(fusor.runner.geometry.device))


def make_controller(config: EngineConfig, fusor: Fusor, profile: Profile) -> LoadingController:
    """A controller that plans with a profile.

    Raises:
        ProfileError: it is of another model, device or version.
    """
    profile.check(model=fusor.fingerprint, device=describe_device(fusor.runner.geometry.device))
    schedule = config.fusion_config(None).schedule
    return LoadingController(config.loader, profile, schedule, copied_tiers(fusor.runner.geometry.device))


def find_controller(config: EngineConfig, fusor: Fusor) -> LoadingController | None:
    """A controller with the profile that stands beside the store; None, and so r* for every request, without one."""
    r_star = config.loader.quality_ratio
    try:
        profile = find_profile(config, fusor)
    except ProfileError as error:
        logger.warning("%s; until then the recompute ratio is r* = %s", error, r_star)
        return None
    if profile is not None:
        return make_controller(config, fusor, profile)
    logger.info(
        "no profile of this model on %s; the recompute ratio is r* = %s until `cacheblend profile` has made one",
        describe_device(fusor.runner.geometry.device),
        r_star,
    )
    return None


def find_calibration(config: EngineConfig, fusor: Fusor, prefix_ids: Sequence[int]) -> Calibration | None:
    """The calibration that stands beside the store; None where there is none, or, with a warning, none that can be used.

    Args:
        config: the user's.
        fusor: the model.
        prefix_ids: what every prompt begins with.
    """
    try:
        return read_calibration(config.profile_dir, model=fusor.fingerprint, prefix=prefix_digest(prefix_ids))
    except ProfileError as error:
        logger.warning("%s; until then the defaults hold", error)
        return None


def calibrated(config: EngineConfig, found: Calibration | None) -> EngineConfig:
    """The config with r* and selector of a calibration.

    A selector that the config names stays; so do a `LoaderConfig.quality_ratio` other than the default, and `max_ratio`, which
    r* is cut to. A `recompute_ratio` still comes first. The context decides the keys of the stored KV: where the calibration's
    is another one, the engine's stays, and a warning says so.

    Args:
        config: the user's.
        found: see `find_calibration`.
    """
    if found is None:
        return config
    _compare_context(config, found)
    loader = config.loader
    if loader.quality_ratio == LoaderConfig().quality_ratio:
        if found.ratio > loader.max_ratio:
            logger.warning("the calibrated ratio %g is more than max_ratio=%g, which is taken", found.ratio, loader.max_ratio)
        loader = replace(loader, quality_ratio=min(found.ratio, loader.max_ratio))
    settled = replace(config, fusion=replace(config.fusion, selector=config.fusion.selector or found.selector), loader=loader)
    logger.info("calibrated: r* = %g, selector %s", loader.quality_ratio, settled.fusion.selector)
    return settled


def context_name(config: EngineConfig) -> str:
    """The context of an engine's chunks' KV, by the names of `CONTEXT_OPTIONS`."""
    has = config.context_filler != "none", config.context_document_tokens > 0
    return next(name for name, (filler, tokens) in CONTEXT_OPTIONS.items() if (filler != "none", tokens > 0) == has)


def _compare_context(config: EngineConfig, found: Calibration) -> None:
    """Warn where the calibration's KV has another context than the engine's."""
    own = context_name(config)
    if own == found.context:
        return
    if found.context in CONTEXT_OPTIONS:
        remedy = "set --context-filler {} --context-document-tokens {}, ingest again, or calibrate with this one".format(
            *CONTEXT_OPTIONS[found.context]
        )
    else:
        remedy = f"which an engine does not have; calibrate with --contexts {','.join(CONTEXT_OPTIONS)}"
    logger.warning(
        "the calibration's KV was computed after the context %r, and this engine's is after %r: %s", found.context, own, remedy
    )


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
    policy: BlendPolicy,
    *,
    prefix_tokens: int,
    chunks: int,
    tier: str,
) -> tuple[int, tuple[CostPoint, ...]]:
    """Predict a prompt of full chunks that are all stored.

    Args:
        config: chunk size and codec.
        fusor: the model.
        policy: estimates the work, and with a profile the seconds.
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

    counts = BlendCounts(tuple(reads), reusable, fresh, prefix_tokens)
    costs = (
        CostPoint(ratio=ratio, work_share=policy.share(ratio, counts), prefill_s=policy.predict_s(ratio, counts))
        for ratio in RATIOS
    )
    return prefix_tokens + reusable + fresh, tuple(costs)
