"""An engine's settings as its store's calibration has them: what the user set wins, the context is never switched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from cacheblend.base.errors import ProfileError
from cacheblend.blend import Fusor
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.loader import Calibration, LoaderConfig, read_calibration
from cacheblend.loader.calibration import prefix_digest

from .config import EngineConfig

logger = logging.getLogger(__name__)
# Contexts of chunks' KV that an engine can have, by `cacheblend eval`'s names: filler passages, and a document's window.
CONTEXT_OPTIONS = {
    "default": ("auto", DOCUMENT_TOKENS),
    "filler": ("auto", 0),
    "document": ("none", DOCUMENT_TOKENS),
    "head": ("none", 0),
}


def calibrated(config: EngineConfig, fusor: Fusor, prefix_ids: Sequence[int]) -> EngineConfig:
    """The config with r* and selector of the calibration that stands beside the store.

    A selector that the config names stays; so do a `LoaderConfig.quality_ratio` other than the default, and `max_ratio`, which
    r* is cut to. A `recompute_ratio` still comes first. The context decides the keys of the stored KV: another than the
    engine's is told in a warning, and stays. A calibration that is damaged or of another model is told and left.

    Args:
        config: the user's.
        fusor: the model.
        prefix_ids: what every prompt begins with.
    """
    found = _find(config, fusor, prefix_ids)
    if found is None:
        return config
    _compare_context(config, found)
    loader = config.loader
    if loader.quality_ratio == LoaderConfig().quality_ratio:
        if found.ratio > loader.max_ratio:
            logger.warning("the calibrated ratio %g is more than max_ratio=%g, which is taken", found.ratio, loader.max_ratio)
        loader = replace(loader, quality_ratio=min(found.ratio, loader.max_ratio))
    settled = replace(config, selector=config.selector or found.selector, loader=loader)
    logger.info("calibrated: r* = %g, selector %s", loader.quality_ratio, settled.selector)
    return settled


def _find(config: EngineConfig, fusor: Fusor, prefix_ids: Sequence[int]) -> Calibration | None:
    try:
        return read_calibration(config.profile_dir, model=fusor.fingerprint, prefix=prefix_digest(prefix_ids))
    except ProfileError as error:
        logger.warning("%s; until then the defaults hold", error)
        return None


def _compare_context(config: EngineConfig, found: Calibration) -> None:
    filler, document = config.context_filler != "none", config.context_document_tokens > 0
    own = next(name for name, (a, b) in CONTEXT_OPTIONS.items() if (a != "none", b > 0) == (filler, document))
    if own == found.context:
        return
    if found.context not in CONTEXT_OPTIONS:
        remedy = f"which an engine does not have; calibrate with --contexts {','.join(CONTEXT_OPTIONS)}"
    else:
        filler_option, document_option = CONTEXT_OPTIONS[found.context]
        remedy = (
            f"set --context-filler {filler_option} --context-document-tokens {document_option}, ingest again, "
            "or calibrate with this one"
        )
    logger.warning(
        "the calibration's KV was computed after the context %r, and this engine's is after %r: %s", found.context, own, remedy
    )
