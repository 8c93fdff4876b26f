"""Runs: a configuration, its folder, and what came out."""

from .calibration import CalibrationRun, calibrate, calibration_config
from .config import EvalConfig
from .folder import RunFolder
from .report import report
from .runner import evaluate, load_fusor
from .summary import summarize

__all__ = [
    "CalibrationRun",
    "EvalConfig",
    "RunFolder",
    "calibrate",
    "calibration_config",
    "evaluate",
    "load_fusor",
    "report",
    "summarize",
]
