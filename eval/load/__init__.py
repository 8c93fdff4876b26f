"""Load: requests at random moments against servers, rates swept, methods side by side (paper figure 14)."""

from cacheblend.base.extras import needs_extra

with needs_extra("eval"):
    from .report import Curve, is_load_run, load_report, read_summary, throughput_at
    from .sweep import LoadConfig, run_load
    from .target import LoadRequest, Target, load_requests, own_targets, peer_target, split_requests

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
