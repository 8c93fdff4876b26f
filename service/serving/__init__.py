"""Many requests at once on one model: a bounded, fair queue, and one thread that fuses and decodes in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from cacheblend.service.engine.document_encoder import Check as Check

    from .calls import Call as Call
    from .calls import CallPool as CallPool
    from .config import ServingConfig as ServingConfig
    from .quality_guard import Comparison as Comparison
    from .quality_guard import QualityStatus as QualityStatus
    from .quality_guard import ShadowReport as ShadowReport
    from .request import Done as Done
    from .request import Event as Event
    from .request import Failed as Failed
    from .request import Piece as Piece
    from .request import ServedRequest as ServedRequest
    from .sampling import GrammarCompiler as GrammarCompiler
    from .sampling import Sampling as Sampling
    from .sampling import TokenLogprob as TokenLogprob
    from .scheduler import Observer as Observer
    from .scheduler import Scheduler as Scheduler
    from .scheduler import SchedulerState as SchedulerState

_MODULES = {
    "cacheblend.service.engine.document_encoder": ("Check",),
    ".calls": ("Call", "CallPool"),
    ".config": ("ServingConfig",),
    ".quality_guard": ("Comparison", "QualityStatus", "ShadowReport"),
    ".request": ("Done", "Event", "Failed", "Piece", "ServedRequest"),
    ".sampling": ("GrammarCompiler", "Sampling", "TokenLogprob"),
    ".scheduler": ("Observer", "Scheduler", "SchedulerState"),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
