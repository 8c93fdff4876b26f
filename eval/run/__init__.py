"""Runs: a configuration, its folder, and what came out."""

from .config import EvalConfig
from .folder import RunFolder
from .report import report
from .runner import evaluate, load_fusor
from .summary import summarize

__all__ = ["EvalConfig", "RunFolder", "evaluate", "load_fusor", "report", "summarize"]
