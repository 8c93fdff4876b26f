"""The connector's options, from vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from cacheblend.base.errors import ConfigError, ProfileError
from cacheblend.base.options import from_options, options_of
from cacheblend.blend import DEFAULT_RATIO, FusionConfig, KVGeometry
from cacheblend.loader import LoaderConfig, LoadingController, copied_tiers, describe_device, read_profile
from cacheblend.service.engine.config import KV_FOLDER, EngineConfig
from cacheblend.store import StoreConfig

logger = logging.getLogger(__name__)
_ENGINE = EngineConfig(model="any", store_dir="any")
# Options that the environment may have instead, as it may for the other commands: vLLM logs the ones that it is given.
# What prompts begin with (a system message) has so large a part of the RAM budget, one over this.
OPENINGS_PART = 8
REMOTE_TEXTS = ("remote", "remote_secret", "remote_secret_file")
REMOTE_NUMBERS = ("remote_timeout_s", "remote_ttl_s", "remote_queue_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Options of the connector: the store of chunks' KV, and the blending of prompts.

    Args:
        store_dir: a store folder, as `cacheblend ingest --store-dir` makes it; made when missing. Chunks that were ingested
            offline with the same model, dtype and instruction are hits here.
        recompute_ratio: share of the reusable tokens to recompute, 0..1, where a request does not say; see `FusionConfig`.
        ram_budget_bytes: see `StoreConfig`; the workers of one engine share it, and an eighth is for what prompts begin with.
        nvme_budget_bytes: see `StoreConfig`.
        codec: how chunks' KV is stored; see `EngineConfig`.
        instruction: what chunks' KV is computed after, with the chat template's beginning; see `EngineConfig`.
        context_filler: passages that chunks' KV is computed after; see `EngineConfig`.
        chunk_tokens: size of the chunks that the HTTP routes cut documents into.
        separator: text between two chunks of a prompt, for clients that can mark chunks in no other way; "" for none.
        remote: URL of a tier behind the disk that machines share; see `StoreConfig`, as for the others of its kind. Where it or
            a secret is not given, the variable counts that the other commands read (`CACHEBLEND_REMOTE`, ...).

    Raises:
        ConfigError: an unknown option, or a value that is not allowed.
    """

    store_dir: str
    recompute_ratio: float = DEFAULT_RATIO
    ram_budget_bytes: int = _ENGINE.store.ram_budget_bytes
    nvme_budget_bytes: int = _ENGINE.store.nvme_budget_bytes
    codec: str = _ENGINE.kv_cache_dtype
    instruction: str = _ENGINE.instruction
    context_filler: str = _ENGINE.context_filler
    chunk_tokens: int = _ENGINE.retriever.chunk_tokens
    separator: str = ""
    remote: str | None = field(default=None, repr=False)
    remote_secret: str | None = field(default=None, repr=False)
    remote_secret_file: str | None = None
    remote_timeout_s: float = _ENGINE.store.remote_timeout_s
    remote_ttl_s: int | None = _ENGINE.store.remote_ttl_s
    remote_queue_bytes: int = _ENGINE.store.remote_queue_bytes

    def __post_init__(self) -> None:
        both = {
            "model": "any",
            "store_dir": self.store_dir,
            "recompute_ratio": self.recompute_ratio,
            "ram_budget_bytes": self.ram_budget_bytes,
            "nvme_budget_bytes": self.nvme_budget_bytes,
            "kv_cache_dtype": self.codec,
            "context_filler": self.context_filler,
            "chunk_tokens": self.chunk_tokens,
            **self._remote,
        }
        from_options(EngineConfig, both)  # which checks them
        if not isinstance(self.instruction, str):
            raise ConfigError("instruction", self.instruction, "a text")
        if not isinstance(self.separator, str) or (self.separator and not self.separator.strip()):
            raise ConfigError("separator", self.separator, 'a text that is not white space alone, or "" for none')

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ConnectorConfig:
        """The configuration that vLLM's `kv_connector_extra_config` names.

        Raises:
            ConfigError: an unknown option, none for `store_dir`, or a value that is not allowed.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise ConfigError("kv_connector_extra_config", unknown, f"options are {', '.join(sorted(known))}")
        if "store_dir" not in options:
            raise ConfigError("kv_connector_extra_config", dict(options), 'give "store_dir", the folder of the chunks\' KV')
        known_to_all = options_of(StoreConfig)
        variables = {name: os.environ.get(known_to_all[name].variable) for name in REMOTE_TEXTS}
        return cls(**{**{name: value for name, value in variables.items() if value}, **options})

    def prefix_tokens(self, geometry: KVGeometry, workers: int) -> int:
        """Tokens of prompts' prefixes whose KV, of this shape, a worker holds in memory: a part of the RAM budget."""
        token_bytes = geometry.layers * geometry.layer_bytes(1)
        return self.ram_budget_bytes // OPENINGS_PART // workers // token_bytes

    def store_config(self, workers: int = 1) -> StoreConfig:
        """The store of one worker; the remaining RAM budget is for `prefix_tokens`."""
        return StoreConfig(
            directory=Path(self.store_dir) / KV_FOLDER,
            ram_budget_bytes=max(1, (self.ram_budget_bytes - self.ram_budget_bytes // OPENINGS_PART) // workers),
            nvme_budget_bytes=self.nvme_budget_bytes,
            **self._remote,
        )

    @property
    def _remote(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*REMOTE_TEXTS, *REMOTE_NUMBERS)}

    @property
    def profile_dir(self) -> Path:
        """Folder of the measured profiles."""
        return EngineConfig(model="any", store_dir=self.store_dir).profile_dir

    def find_controller(self, model: str, device: torch.device) -> LoadingController | None:
        """The loading controller with the profile that stands beside the store; None where there is none.

        Args:
            model: fingerprint.
            device: where it runs.
        """
        try:
            profile = read_profile(self.profile_dir, model=model, device=describe_device(device))
        except ProfileError as error:
            logger.warning("%s; until then the recompute ratio is %s", error, self.recompute_ratio)
            return None
        if profile is None:
            return None
        loader = LoaderConfig(quality_ratio=self.recompute_ratio)
        return LoadingController(loader, profile, FusionConfig().schedule, copied_tiers(device))
