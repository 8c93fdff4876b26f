"""The rival methods behind one small interface, one a file."""

from .history import CacheHistory, EverythingCached, SeenBefore
from .method import Method, MethodAnswer
from .registry import DEFAULT_RATIO, METHODS, PlannedMethod, make_methods, plan_methods
from .resident import CONTEXTS, ResidentRequest, StoredContexts

__all__ = [
    "CONTEXTS",
    "DEFAULT_RATIO",
    "METHODS",
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
