"""Runs: a configuration, its folder, and what came out."""

from .calibration import CalibrationRun, calibrate, calibration_config
from .folder import EvalConfig, RunFolder
from .report import summarize
from .runner import evaluate, load_fusor

__all__ = [
    "CalibrationRun",
    "EvalConfig",
    "RunFolder",
    "calibrate",
    "calibration_config",
    "evaluate",
    "load_fusor",
    "summarize",
]
