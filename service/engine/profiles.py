"""Profile and calibration beside a store: the loading controller is made from the one, r* and selector are the other's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from cacheblend.base.errors import ProfileError
from cacheblend.blend import Fusor
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

from .config import EngineConfig

logger = logging.getLogger(__name__)
# Contexts of chunks' KV that an engine can have, by `cacheblend eval`'s names: filler passages, and a document's window.
CONTEXT_OPTIONS = {
    "default": ("auto", DOCUMENT_TOKENS),
    "filler": ("auto", 0),
    "document": ("none", DOCUMENT_TOKENS),
    "head": ("none", 0),
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
    return LoadingController(config.loader, profile, config.fusion.schedule, copied_tiers(fusor.runner.geometry.device))


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
