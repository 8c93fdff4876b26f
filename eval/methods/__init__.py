"""The rival methods behind one small interface, one a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from cacheblend.blend import DEFAULT_RATIO as DEFAULT_RATIO

    from .method import Method as Method
    from .method import MethodAnswer as MethodAnswer
    from .method import ResidentRequest as ResidentRequest
    from .method import StoredContexts as StoredContexts
    from .registry import CONTEXTS as CONTEXTS
    from .registry import FULL_REUSE as FULL_REUSE
    from .registry import METHOD_OF_SELECTOR as METHOD_OF_SELECTOR
    from .registry import METHODS as METHODS
    from .registry import CacheHistory as CacheHistory
    from .registry import EverythingCached as EverythingCached
    from .registry import PlannedMethod as PlannedMethod
    from .registry import SeenBefore as SeenBefore
    from .registry import make_methods as make_methods
    from .registry import plan_methods as plan_methods

_MODULES = {
    "cacheblend.blend": ("DEFAULT_RATIO",),
    ".method": (
        "Method",
        "MethodAnswer",
        "ResidentRequest",
        "StoredContexts",
    ),
    ".registry": (
        "CONTEXTS",
        "FULL_REUSE",
        "METHOD_OF_SELECTOR",
        "METHODS",
        "CacheHistory",
        "EverythingCached",
        "PlannedMethod",
        "SeenBefore",
        "make_methods",
        "plan_methods",
    ),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
