"""The rival methods behind one small interface, one a file."""

from .history import CacheHistory, EverythingCached, SeenBefore
from .method import Method, MethodAnswer
from .registry import DEFAULT_RATIO, FULL_REUSE, METHOD_OF_SELECTOR, METHODS, PlannedMethod, make_methods, plan_methods
from .resident import CONTEXTS, ResidentRequest, StoredContexts

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
