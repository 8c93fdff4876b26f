"""The service: engine, scheduler, HTTP API and command line."""

from __future__ import annotations

from .engine.blend_plan import PlannedSegment
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.ingest import IngestReport
from .engine.request import Answer, AnswerPlan, Timings

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]
