"""The engine that joins retriever, store, loader and fusor, and the command line."""

from .engine.answer import Answer, AnswerPlan, IngestReport, PlannedSegment, Timings
from .engine.config import EngineConfig
from .engine.engine import Engine

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]
