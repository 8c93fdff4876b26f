"""Layer-wise prefetch of stored KV, and the controller that picks the recompute ratio."""

from __future__ import annotations

from .controller import LoadingController, LoadingPlan
from .estimators import WorkEstimator
from .layer_loader import LayerLoader, LoaderConfig, copied_tiers
from .profile import (
    Calibration,
    LayerSample,
    Measures,
    PrefillSample,
    Profile,
    Thresholds,
    TierSpeed,
    describe_device,
    load_profile,
    prefix_digest,
    read_calibration,
    read_profile,
    write_calibration,
    write_profile,
)
from .profiler import measure_profile
from .storage_plan import StorageDevice, compare_devices

__all__ = [
    "Calibration",
    "LayerLoader",
    "LayerSample",
    "LoaderConfig",
    "LoadingController",
    "LoadingPlan",
    "Measures",
    "PrefillSample",
    "Profile",
    "StorageDevice",
    "Thresholds",
    "TierSpeed",
    "WorkEstimator",
    "compare_devices",
    "copied_tiers",
    "describe_device",
    "load_profile",
    "measure_profile",
    "prefix_digest",
    "read_calibration",
    "read_profile",
    "write_calibration",
    "write_profile",
]
