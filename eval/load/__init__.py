"""Load: requests at random moments against servers, rates swept, methods side by side (paper figure 14)."""

from .config import LoadConfig
from .equal_ttft import Curve, throughput_at
from .report import is_load_run, load_report, read_summary
from .request_set import LoadRequest, load_requests, split_requests
from .sweep import run_load
from .target import Target, own_targets, peer_target

__all__ = [
    "Curve",
    "LoadConfig",
    "LoadRequest",
    "Target",
    "is_load_run",
    "load_report",
    "load_requests",
    "own_targets",
    "peer_target",
    "read_summary",
    "run_load",
    "split_requests",
    "throughput_at",
]
