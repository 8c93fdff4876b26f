"""The method: chunks' KV computed after a context, keys rotated to their place, chosen tokens recomputed layer by layer."""

from __future__ import annotations

from cacheblend.base.errors import IncompatibleKVError, UnsupportedModelError

from .fusion import DEFAULT_RATIO, FusionConfig
from .fusor import Fusor
from .generation import NextToken, SequenceKV
from .interfaces import KVGeometry, LayerKV, LayerSink, LayerSource, ModelRunner, ResidentLayers
from .precompute import ChunkContext
from .prompt import FusionResult, LayerReport, Prompt, Segment
from .selectors import DEFAULT_SELECTOR, SELECTORS, ExplicitPositions, Schedule, SelectionStep, Selector, TopDeviation

__all__ = [
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "ChunkContext",
    "ExplicitPositions",
    "FusionConfig",
    "FusionResult",
    "Fusor",
    "IncompatibleKVError",
    "KVGeometry",
    "LayerKV",
    "LayerReport",
    "LayerSink",
    "LayerSource",
    "ModelRunner",
    "NextToken",
    "Prompt",
    "ResidentLayers",
    "Schedule",
    "Segment",
    "SelectionStep",
    "Selector",
    "SequenceKV",
    "TopDeviation",
    "UnsupportedModelError",
]
