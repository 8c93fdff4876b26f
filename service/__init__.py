"""The engine that joins retriever, store, loader and fusor, and the command line."""

from .answer import Answer, AnswerPlan, IngestReport, PlannedSegment, Timings
from .config import EngineConfig
from .engine import Engine

__all__ = ["Answer", "AnswerPlan", "Engine", "EngineConfig", "IngestReport", "PlannedSegment", "Timings"]
