"""The method: a chunk's KV, keys moved to their place, HKVD tokens picked, fused layer by layer."""

from cacheblend.base.errors import IncompatibleKVError, UnsupportedModelError

from .batch_decoding import SequenceKV
from .config import FusionConfig
from .fused import FusedPrompt, LayerReport
from .fusor import Fusor
from .layer_source import KVGeometry, LayerKV, LayerSource, ResidentLayers
from .model_runner import LayerSink, ModelRunner
from .next_token import NextToken
from .precompute import ChunkContext
from .schedule import Schedule
from .segment import Prompt, Segment, SegmentKV
from .selection import SELECTORS, ExplicitPositions, SelectionStep, Selector, TopDeviation

__all__ = [
    "SELECTORS",
    "ChunkContext",
    "ExplicitPositions",
    "FusedPrompt",
    "FusionConfig",
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
    "SegmentKV",
    "SelectionStep",
    "Selector",
    "SequenceKV",
    "TopDeviation",
    "UnsupportedModelError",
]
