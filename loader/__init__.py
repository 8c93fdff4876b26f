"""Layer-wise prefetch of stored KV, and the controller that picks the recompute ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from .calibration import Calibration as Calibration
    from .calibration import Measures as Measures
    from .calibration import Thresholds as Thresholds
    from .calibration import read_calibration as read_calibration
    from .calibration import write_calibration as write_calibration
    from .controller import FrontChunk as FrontChunk
    from .controller import LoadingController as LoadingController
    from .controller import LoadingPlan as LoadingPlan
    from .estimators import WorkEstimator as WorkEstimator
    from .layer_loader import LayerLoader as LayerLoader
    from .layer_loader import LoaderConfig as LoaderConfig
    from .layer_loader import copied_tiers as copied_tiers
    from .profile import LayerSample as LayerSample
    from .profile import PrefillSample as PrefillSample
    from .profile import Profile as Profile
    from .profile import TierSpeed as TierSpeed
    from .profile import describe_device as describe_device
    from .profile import load_profile as load_profile
    from .profile import read_profile as read_profile
    from .profile import write_profile as write_profile
    from .profiler import measure_profile as measure_profile
    from .storage_plan import StorageDevice as StorageDevice
    from .storage_plan import compare_devices as compare_devices
    from .storage_plan import read_price_table as read_price_table

_MODULES = {
    ".calibration": ("Calibration", "Measures", "Thresholds", "read_calibration", "write_calibration"),
    ".controller": ("FrontChunk", "LoadingController", "LoadingPlan"),
    ".estimators": ("WorkEstimator",),
    ".layer_loader": ("LayerLoader", "LoaderConfig", "copied_tiers"),
    ".profile": (
        "LayerSample",
        "PrefillSample",
        "Profile",
        "TierSpeed",
        "describe_device",
        "load_profile",
        "read_profile",
        "write_profile",
    ),
    ".profiler": ("measure_profile",),
    ".storage_plan": ("StorageDevice", "compare_devices", "read_price_table"),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
