"""Layer-wise prefetch of stored KV, and the controller that picks the recompute ratio."""

from __future__ import annotations

from .calibration import Calibration, Measures, Thresholds, read_calibration, write_calibration
from .controller import LoadingController, LoadingPlan
from .estimators import WorkEstimator
from .layer_loader import LayerLoader, LoaderConfig, copied_tiers
from .profile import LayerSample, PrefillSample, Profile, TierSpeed, describe_device, load_profile, read_profile, write_profile
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
    "read_calibration",
    "read_profile",
    "write_calibration",
    "write_profile",
]
