"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""

from .calls import Call, CallPool, Check
from .config import ServingConfig
from .quality_guard import Comparison, QualityStatus, ShadowReport
from .request import Done, Event, Failed, Piece, ServedRequest
from .sampling import GrammarCompiler, Sampling, TokenLogprob
from .scheduler import Observer, Scheduler, SchedulerState

__all__ = [
    "Call",
    "CallPool",
    "Check",
    "Comparison",
    "Done",
    "Event",
    "Failed",
    "GrammarCompiler",
    "Observer",
    "Piece",
    "QualityStatus",
    "Sampling",
    "Scheduler",
    "SchedulerState",
    "ServedRequest",
    "ServingConfig",
    "ShadowReport",
    "TokenLogprob",
]
