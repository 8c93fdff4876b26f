"""The engine's loading controller: from the profile beside the store, or a new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cacheblend.base.errors import ProfileError
from cacheblend.blend import Fusor
from cacheblend.loader import (
    LoadingController,
    Profile,
    copied_tiers,
    describe_device,
    measure_profile,
    read_profile,
    write_profile,
)
from cacheblend.loader.profiler import LENGTHS, RATIOS

from .config import EngineConfig

logger = logging.getLogger(__name__)


def make_controller(config: EngineConfig, fusor: Fusor, profile: Profile) -> LoadingController:
    """A controller that plans with a profile.

    Raises:
        ProfileError: it is of another model, device or version.
    """
    profile.check(model=fusor.fingerprint, device=describe_device(fusor.decoder.device))
    schedule = config.fusion_config(None).schedule
    return LoadingController(config.loader, profile, schedule, copied_tiers(fusor.decoder.device))


def find_profile(config: EngineConfig, fusor: Fusor) -> Profile | None:
    """The profile of the model on its device that stands beside the store; None where none was made.

    Raises:
        ProfileError: it is damaged.
    """
    return read_profile(config.profile_dir, model=fusor.fingerprint, device=describe_device(fusor.decoder.device))


def find_controller(config: EngineConfig, fusor: Fusor) -> LoadingController | None:
    """A controller with the profile that stands beside the store; None, and so r* for every request, without one."""
    try:
        profile = find_profile(config, fusor)
    except ProfileError as error:
        logger.warning("%s; until then the recompute ratio is r* = %s", error, config.loader.quality_ratio)
        return None
    if profile is None:
        logger.info(
            "no profile of this model on %s; the recompute ratio is r* = %s until `cacheblend profile` has made one",
            describe_device(fusor.decoder.device),
            config.loader.quality_ratio,
        )
        return None
    return make_controller(config, fusor, profile)


def measure_and_keep(
    config: EngineConfig,
    fusor: Fusor,
    *,
    lengths: Sequence[int] = LENGTHS,
    ratios: Sequence[float] = RATIOS,
    repeats: int = 3,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """Measure a model, its device and the disk of the store, and keep that beside the store; see `measure_profile`.

    Raises:
        ConfigError: a length, ratio or number of repeats outside its range.
        ProfileError: the store's folder cannot be written.
    """
    profile = measure_profile(
        fusor,
        config.profile_dir,
        config.loader,
        chunk_tokens=config.chunk_tokens,
        lengths=lengths,
        ratios=ratios,
        repeats=repeats,
        on_progress=on_progress,
    )
    write_profile(config.profile_dir, profile)
    return profile
