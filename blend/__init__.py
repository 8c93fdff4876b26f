"""The method: chunks' KV computed after a context, keys rotated to their place, chosen tokens recomputed layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.errors import IncompatibleKVError as IncompatibleKVError
from cacheblend.base.errors import UnsupportedModelError as UnsupportedModelError
from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import DEFAULT_RATIO as DEFAULT_RATIO
    from .config import DEFAULT_SELECTOR as DEFAULT_SELECTOR
    from .config import FusionConfig as FusionConfig
    from .fusor import Fusor as Fusor
    from .generation import NextToken as NextToken
    from .generation import SequenceKV as SequenceKV
    from .interfaces import KVGeometry as KVGeometry
    from .interfaces import LayerKV as LayerKV
    from .interfaces import LayerSink as LayerSink
    from .interfaces import LayerSource as LayerSource
    from .interfaces import ModelRunner as ModelRunner
    from .interfaces import ResidentLayers as ResidentLayers
    from .precompute import ChunkContext as ChunkContext
    from .prompt import FusionResult as FusionResult
    from .prompt import LayerReport as LayerReport
    from .prompt import Prompt as Prompt
    from .prompt import Segment as Segment
    from .selectors import SELECTORS as SELECTORS
    from .selectors import ExplicitPositions as ExplicitPositions
    from .selectors import Schedule as Schedule
    from .selectors import SelectionStep as SelectionStep
    from .selectors import Selector as Selector

__getattr__ = lazy_names(__name__, __file__)
