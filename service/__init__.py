"""The service: engine, scheduler, HTTP API and command line."""

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .engine.config import EngineConfig as EngineConfig
    from .engine.engine import Engine as Engine
    from .engine.ingest import IngestReport as IngestReport
    from .engine.request import Answer as Answer
    from .engine.request import AnswerPlan as AnswerPlan

__getattr__ = lazy_names(__name__, __file__)
