"""The rival methods behind one small interface, one a file."""

from .history import CacheHistory, EverythingCached, SeenBefore
from .method import Method, MethodAnswer
from .registry import DEFAULT_RATIO, METHODS, PlannedMethod, make_methods, plan_methods
from .resident import ResidentRequest

__all__ = [
    "DEFAULT_RATIO",
    "METHODS",
    "CacheHistory",
    "EverythingCached",
    "Method",
    "MethodAnswer",
    "PlannedMethod",
    "ResidentRequest",
    "SeenBefore",
    "make_methods",
    "plan_methods",
]
