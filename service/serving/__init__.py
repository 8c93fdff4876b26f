"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""

from .calls import Call, CallPool, Check
from .config import ServingConfig
from .quality_guard import Comparison, QualityStatus, ShadowReport
from .request import Done, Event, Failed, Piece, ServedRequest
from .scheduler import Observer, Scheduler, SchedulerState

__all__ = [
    "Call",
    "CallPool",
    "Check",
    "Comparison",
    "Done",
    "Event",
    "Failed",
    "Observer",
    "Piece",
    "QualityStatus",
    "Scheduler",
    "SchedulerState",
    "ServedRequest",
    "ServingConfig",
    "ShadowReport",
]
