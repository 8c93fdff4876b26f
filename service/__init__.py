"""The service: engine, scheduler, HTTP API and command line."""

from __future__ import annotations

from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.ingest import IngestReport
from .engine.request import Answer, AnswerPlan, PlannedSegment, Timings

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]
