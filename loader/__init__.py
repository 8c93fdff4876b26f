"""Layer-wise prefetch of stored KV, and the controller that picks the recompute ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import LoaderConfig as LoaderConfig
    from .controller import LoadingController as LoadingController
    from .controller import LoadingPlan as LoadingPlan
    from .estimators import WorkEstimator as WorkEstimator
    from .layer_loader import LayerLoader as LayerLoader
    from .profile import Calibration as Calibration
    from .profile import describe_device as describe_device
    from .profile import load_profile as load_profile
    from .profile import read_calibration as read_calibration
    from .profile import read_profile as read_profile
    from .profile import write_calibration as write_calibration
    from .profile import write_profile as write_profile
    from .profiler import measure_profile as measure_profile
    from .storage_plan import compare_devices as compare_devices

__getattr__ = lazy_names(__name__, __file__)
