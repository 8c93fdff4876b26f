"""The thread that brings layer i+1 while layer i is computed, and the controller that picks the ratio."""

from .config import LoaderConfig
from .controller import LoadingController, LoadingPlan
from .estimators import LoadEstimator, RecomputeEstimator, measure_prefill
from .layer_loader import LayerLoader

__all__ = [
    "LayerLoader",
    "LoadEstimator",
    "LoaderConfig",
    "LoadingController",
    "LoadingPlan",
    "RecomputeEstimator",
    "measure_prefill",
]
