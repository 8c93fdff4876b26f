"""The service: engine, scheduler, HTTP API and command line. Names are imported at their first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.config import EngineConfig
    from .engine.engine import Engine
    from .engine.ingest import IngestReport
    from .engine.request import Answer, AnswerPlan, PlannedSegment, Timings

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]

_MODULES = {"Engine": ".engine.engine", "EngineConfig": ".engine.config", "IngestReport": ".engine.ingest"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, ".engine.request"), __name__), name)
    globals()[name] = value
    return value
