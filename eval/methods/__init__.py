"""The rival methods behind one small interface, one a file."""

from cacheblend.blend import DEFAULT_RATIO

from .method import CONTEXTS, Method, MethodAnswer, ResidentRequest, StoredContexts
from .registry import (
    FULL_REUSE,
    METHOD_OF_SELECTOR,
    METHODS,
    CacheHistory,
    EverythingCached,
    PlannedMethod,
    SeenBefore,
    make_methods,
    plan_methods,
)

__all__ = [
    "CONTEXTS",
    "DEFAULT_RATIO",
    "FULL_REUSE",
    "METHODS",
    "METHOD_OF_SELECTOR",
    "CacheHistory",
    "EverythingCached",
    "Method",
    "MethodAnswer",
    "PlannedMethod",
    "ResidentRequest",
    "SeenBefore",
    "StoredContexts",
    "make_methods",
    "plan_methods",
]
