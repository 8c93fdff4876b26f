"""Profile and calibration beside a store: the loading controller is made from the one, r* and selector are the other's."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from cacheblend.base.errors import ProfileError
from cacheblend.blend import Fusor
from cacheblend.blend.config import DEFAULT_SELECTOR, DOCUMENT_TOKENS
from cacheblend.blend.widening import FIRST_RATIO
from cacheblend.loader import Calibration, LoaderConfig, LoadingController, describe_device, read_calibration, read_profile
from cacheblend.loader.profile import prefix_digest
from cacheblend.store import RAM

from .config import PRESETS, EngineConfig

logger = logging.getLogger(__name__)
# In a model's layers. The first token of smaller ones moves at every prompt: widening costs what it gains (docs/adr/031).
WIDENED_PARAMETERS = 200_000_000
# Contexts of chunks' KV that an engine can have, by `cacheblend eval`'s names: filler passages, and a document's window.
CONTEXT_OPTIONS = {"default": ("auto", DOCUMENT_TOKENS), "filler": ("auto", 0)}
CONTEXT_OPTIONS |= {"document": ("none", DOCUMENT_TOKENS), "head": ("none", 0)}


def find_controller(config: EngineConfig, fusor: Fusor) -> LoadingController | None:
    """A controller with the profile that stands beside the store; None, and so r* for every request, without one."""
    device, r_star = fusor.runner.geometry.device, config.loader.quality_ratio
    try:
        names = {"model": fusor.fingerprint, "device": describe_device(device)}
        profile = next(filter(None, (read_profile(folder, **names) for folder in config.profile_dirs)), None)
    except ProfileError as error:
        logger.warning("%s; until then the recompute ratio is r* = %s", error, r_star)
        return None
    if profile is None:
        none_yet = "no profile of this model on %s; the recompute ratio is r* = %s until `cacheblend profile` has made one"
        logger.info(none_yet, describe_device(device), r_star)
        return None
    return LoadingController(config.loader, profile, config.fusion.schedule, [RAM] if device.type == "cpu" else [])


def calibrated(config: EngineConfig, fusor: Fusor, prefix_ids: Sequence[int]) -> EngineConfig:
    """The config with r* and selector of the calibration that stands beside the store; without one it may be widened.

    A selector that the config names stays; so does a `LoaderConfig.quality_ratio` other than the default. A `recompute_ratio`
    still comes first. The context decides the keys of the stored KV: where the calibration's is another one, the engine's
    stays, and a warning says so.

    Args:
        config: the user's.
        fusor: the model.
        prefix_ids: what every prompt begins with.
    """
    try:
        names = {"model": fusor.fingerprint, "prefix": prefix_digest(prefix_ids)}
        found = next(filter(None, (read_calibration(folder, **names) for folder in config.profile_dirs)), None)
    except ProfileError as error:
        logger.warning("%s; until then the defaults hold", error)
        found = None
    if found is None:
        return _widening(config, fusor)
    _compare_context(config, found)
    loader = _with_ratio(config, found.ratio)
    selector = config.fusion.selector or (found.selector if config.fusion.max_loss_nats is None else None)
    fusion = replace(config.fusion, selector=selector)
    logger.info("calibrated: r* = %g, selector %s", loader.quality_ratio, fusion.selector)
    return replace(config, fusion=fusion, loader=loader)


def _widening(config: EngineConfig, fusor: Fusor) -> EngineConfig:
    """The config with what its preset says of widening, where it names no ratio; a small model's blends are not widened."""
    nats = config.fusion.max_loss_nats
    if nats is None and config.fusion.recompute_ratio is None and config.fusion.selector in (None, DEFAULT_SELECTOR):
        nats = PRESETS[config.preset][1] if fusor.layer_parameters >= WIDENED_PARAMETERS else None
    if nats is None:
        return config
    return replace(config, fusion=replace(config.fusion, max_loss_nats=nats), loader=_with_ratio(config, FIRST_RATIO))


def _with_ratio(config: EngineConfig, ratio: float) -> LoaderConfig:
    """Put r* in place of the default; a config's own stays."""
    is_default = config.recompute_ratio is None and config.loader.quality_ratio == LoaderConfig().quality_ratio
    return replace(config.loader, quality_ratio=ratio) if is_default else config.loader


def _compare_context(config: EngineConfig, found: Calibration) -> None:
    """Warn where the calibration's KV has another context than the engine's."""
    has = config.context_filler != "none", config.context_document_tokens > 0
    own = next(name for name, (filler, tokens) in CONTEXT_OPTIONS.items() if (filler != "none", tokens > 0) == has)
    if own != found.context:
        options = CONTEXT_OPTIONS.get(found.context)  # an engine has not all that a calibration measures
        others = "set --context-filler {} --context-document-tokens {}, ingest again, or ".format(*options) if options else ""
        why = "the calibration's KV is after the context %r, and this engine's after %r: %scalibrate with --contexts %s"
        logger.warning(why, found.context, own, others, own)
