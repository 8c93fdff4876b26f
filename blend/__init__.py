"""The method: chunks' KV computed after a context, keys rotated to their place, chosen tokens recomputed layer by layer."""

from typing import TYPE_CHECKING

from cacheblend.base.errors import IncompatibleKVError, UnsupportedModelError
from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import DEFAULT_RATIO, DEFAULT_SELECTOR, FusionConfig
    from .fusor import Fusor
    from .generation import NextToken, SequenceKV
    from .interfaces import KVGeometry, LayerKV, LayerSink, LayerSource, ModelRunner, ResidentLayers
    from .precompute import ChunkContext
    from .prompt import FusionResult, LayerReport, Prompt, Segment
    from .selectors import SELECTORS, ExplicitPositions, Schedule, SelectionStep, Selector

__getattr__ = lazy_names(__name__, __file__)
