"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""

from .config import ServingConfig
from .request import Done, Event, Failed, Piece, ServedRequest
from .scheduler import Scheduler, SchedulerState

__all__ = ["Done", "Event", "Failed", "Piece", "Scheduler", "SchedulerState", "ServedRequest", "ServingConfig"]
