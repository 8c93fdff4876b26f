"""vLLM's entry points: they register the connector, and hand each worker's model to it once its pages are allocated."""

import functools
import os
from typing import Any

from cacheblend.base.errors import UnsupportedModelError

CONNECTOR = "CacheBlendConnector"
SUPPORTED = "0.32"  # the minor version whose internals `runner` and `connector` were run with
# Defaults in vLLM's processes. oneDNN and PyTorch over it keep up to 1,024 kernels of a MB each, one for every number of rows
# that a weight has met; prefills have others each. The connector works in Model Runner V1, which is no GPU's default.
VARIABLES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32", "VLLM_USE_V2_MODEL_RUNNER": "0"}
CLOSE_S = 15  # in which a store writes what waits when vLLM stops, if nobody sets `--shutdown-timeout`


def register() -> None:
    """Called by vLLM in each of its processes, possibly several times; nothing changes for those without the connector.

    A worker with the connector raises UnsupportedModelError in a vLLM that the connector was not tested with.
    """
    from vllm import __version__
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.engine import utils as engine_processes
    from vllm.v1.worker.gpu_worker import Worker

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__package__}.connector", CONNECTOR)
    if hasattr(Worker, "cacheblend_precompute"):
        return
    own, complete = Worker.initialize_from_config, VllmConfig.__post_init__

    @functools.wraps(complete)
    def complete_config(self: Any) -> None:
        transfer, scheduling = self.kv_transfer_config, self.scheduler_config
        has_connector = transfer is not None and transfer.has_connector(CONNECTOR)
        if has_connector and transfer.kv_connector != CONNECTOR:
            raise UnsupportedModelError(f"{CONNECTOR} does not work inside {transfer.kv_connector}; name it by itself")
        # vLLM puts its own connector in this one's place.
        if has_connector and self.cache_config.kv_offloading_size is not None:
            raise UnsupportedModelError(f"{CONNECTOR} does not work with --kv-offloading-size; leave it out")
        if has_connector and not self.model_config.is_hybrid:
            engine_processes.get_engine_process_shutdown_timeout = _seconds_to_end
            if self.parallel_config.data_parallel_size > 1:  # which engines of dense models do not see
                raise UnsupportedModelError(f"{CONNECTOR} does not work with data parallelism; leave it out")
            for variable, value in VARIABLES.items():
                os.environ.setdefault(variable, value)
            if scheduling.disable_hybrid_kv_cache_manager is None:
                scheduling.disable_hybrid_kv_cache_manager = True  # windowed layers' KV in one group with the others'
        complete(self)

    @functools.wraps(own)
    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        own(self, kv_cache_config)
        if (connector := _connector()) is not None:
            if not f"{__version__}.".startswith(f"{SUPPORTED}."):
                why = f"{CONNECTOR} works in vLLM {SUPPORTED}, and this is {__version__}"
                raise UnsupportedModelError(f"{why}: install that version, or another one of cacheblend")
            connector.attach(self)

    VllmConfig.__post_init__ = complete_config
    Worker.initialize_from_config = initialize_from_config
    Worker.cacheblend_precompute = _precompute


def _seconds_to_end(request_s: float | None, process_s: float | None) -> float | None:
    """Seconds after which vLLM kills its engine's process: by its own default none, and then the store could not close."""
    return process_s if request_s or process_s else CLOSE_S


def _connector() -> Any | None:
    """The worker's `CacheBlendConnector`; None where vLLM runs without it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return group if type(group).__name__ == CONNECTOR else None


def _precompute(_worker: Any, *args: Any) -> list[int]:
    """See `CacheBlendConnector.precompute`; nothing without the connector."""
    connector = _connector()
    return [0, 0, 0] if connector is None else list(connector.precompute(*args))
