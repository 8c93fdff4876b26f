"""Load: requests at random moments against servers, rates swept, methods side by side (paper figure 14)."""

from .config import LoadConfig
from .equal_ttft import Curve, throughput_at
from .report import load_report
from .request_set import LoadRequest, load_requests
from .sweep import run_load
from .target import Target, own_targets, peer_target

__all__ = [
    "Curve",
    "LoadConfig",
    "LoadRequest",
    "Target",
    "load_report",
    "load_requests",
    "own_targets",
    "peer_target",
    "run_load",
    "throughput_at",
]
