"""The method: chunks' KV computed after a context, keys rotated to their place, chosen tokens recomputed layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from cacheblend.base.errors import IncompatibleKVError as IncompatibleKVError
    from cacheblend.base.errors import UnsupportedModelError as UnsupportedModelError

    from .fusor import Fusor as Fusor
    from .generation import NextToken as NextToken
    from .generation import SequenceKV as SequenceKV
    from .layer_source import KVGeometry as KVGeometry
    from .layer_source import LayerKV as LayerKV
    from .layer_source import LayerSource as LayerSource
    from .layer_source import ResidentLayers as ResidentLayers
    from .layer_source import check_shape as check_shape
    from .model_runner import LayerSink as LayerSink
    from .model_runner import ModelRunner as ModelRunner
    from .precompute import ChunkContext as ChunkContext
    from .prompt import FusionResult as FusionResult
    from .prompt import LayerReport as LayerReport
    from .prompt import Prompt as Prompt
    from .prompt import Segment as Segment
    from .selection import DEFAULT_RATIO as DEFAULT_RATIO
    from .selection import DEFAULT_SELECTOR as DEFAULT_SELECTOR
    from .selection import SELECTORS as SELECTORS
    from .selection import ExplicitPositions as ExplicitPositions
    from .selection import FusionConfig as FusionConfig
    from .selection import Schedule as Schedule
    from .selection import SelectionStep as SelectionStep
    from .selection import Selector as Selector
    from .selection import TopDeviation as TopDeviation

_MODULES = {
    "cacheblend.base.errors": ("IncompatibleKVError", "UnsupportedModelError"),
    ".fusor": ("Fusor",),
    ".generation": ("NextToken", "SequenceKV"),
    ".layer_source": ("KVGeometry", "LayerKV", "LayerSource", "ResidentLayers", "check_shape"),
    ".model_runner": ("LayerSink", "ModelRunner"),
    ".precompute": ("ChunkContext",),
    ".prompt": ("FusionResult", "LayerReport", "Prompt", "Segment"),
    ".selection": (
        "DEFAULT_RATIO",
        "DEFAULT_SELECTOR",
        "SELECTORS",
        "ExplicitPositions",
        "FusionConfig",
        "Schedule",
        "SelectionStep",
        "Selector",
        "TopDeviation",
    ),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
