"""Load: requests at random moments against servers, rates swept, methods side by side (paper figure 14)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from .report import Curve as Curve
    from .report import is_load_run as is_load_run
    from .report import load_report as load_report
    from .report import read_summary as read_summary
    from .report import throughput_at as throughput_at
    from .sweep import LoadConfig as LoadConfig
    from .sweep import run_load as run_load
    from .target import LoadRequest as LoadRequest
    from .target import Target as Target
    from .target import load_requests as load_requests
    from .target import own_targets as own_targets
    from .target import peer_target as peer_target
    from .target import split_requests as split_requests

_MODULES = {
    ".report": (
        "Curve",
        "is_load_run",
        "load_report",
        "read_summary",
        "throughput_at",
    ),
    ".sweep": (
        "LoadConfig",
        "run_load",
    ),
    ".target": (
        "LoadRequest",
        "Target",
        "load_requests",
        "own_targets",
        "peer_target",
        "split_requests",
    ),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES, extra="eval")
