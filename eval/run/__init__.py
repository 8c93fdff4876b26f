"""Runs: a configuration, its folder, and what came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from .calibration import CalibrationRun as CalibrationRun
    from .calibration import calibrate as calibrate
    from .calibration import calibration_config as calibration_config
    from .folder import EvalConfig as EvalConfig
    from .folder import RunFolder as RunFolder
    from .report import summarize as summarize
    from .runner import evaluate as evaluate
    from .runner import load_fusor as load_fusor

# Not `report`: its module has that name too.
_MODULES = {
    ".calibration": (
        "CalibrationRun",
        "calibrate",
        "calibration_config",
    ),
    ".folder": (
        "EvalConfig",
        "RunFolder",
    ),
    ".report": ("summarize",),
    ".runner": (
        "evaluate",
        "load_fusor",
    ),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
