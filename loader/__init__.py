"""Layer-wise prefetch of stored KV, and the controller that picks the recompute ratio."""

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import LoaderConfig
    from .controller import LoadingController, LoadingPlan
    from .estimators import WorkEstimator
    from .layer_loader import LayerLoader
    from .profile import Calibration, describe_device, load_profile, read_calibration, read_profile, write_profile
    from .profile import write_calibration as write_calibration
    from .profiler import measure_profile
    from .storage_plan import compare_devices

__getattr__ = lazy_names(__name__, __file__)
