"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""

from .call import Call, CallPool, Check
from .comparison import Comparison
from .config import ServingConfig
from .request import Done, Event, Failed, Piece, ServedRequest
from .scheduler import Observer, Scheduler, SchedulerState
from .shadow import CheckReport, QualityStatus

__all__ = [
    "Call",
    "CallPool",
    "Check",
    "CheckReport",
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
]
