"""The engine that joins retriever, store, loader and fusor, and the command line."""

from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.request import Answer, AnswerPlan, IngestReport, PlannedSegment, Timings

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]
