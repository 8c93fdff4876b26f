"""The engine's configuration: model, folder, and the configs of the floors below."""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import ConfigError
from cacheblend.base.files import replacing
from cacheblend.base.options import MIB, check_whole, option
from cacheblend.blend import FusionConfig
from cacheblend.blend.config import DOCUMENT_TOKENS
from cacheblend.loader import LoaderConfig
from cacheblend.retriever import RetrieverConfig
from cacheblend.store import StoreConfig
from cacheblend.store.config import CODEC_NAMES

if TYPE_CHECKING:
    import torch

    from cacheblend.blend import Fusor

logger = logging.getLogger(__name__)
DTYPES = ("auto", "float32", "bfloat16", "float16")
METHODS = ("full_recompute", "prefix_cache", "full_reuse", "blend")
# Of a store folder: the third has the texts that a vLLM was given, the last a store folder for each tenant.
KV_FOLDER, INDEX_FOLDER, VLLM_FOLDER, TENANTS_FOLDER = "kv", "index", "vllm", "tenants"
# A recompute ratio, None for r* or what hides behind loading; and how far a first token may move before a blend is widened.
PRESETS: dict[str, tuple[float | None, float | None]] = {
    "exact": (1.0, None),
    "high": (None, 0.02),
    "balanced": (None, 0.05),
    "fast": (0.05, None),
}
SETTINGS_FILE = "settings.json"  # of a store folder: what the KV in it was computed with, and how much of it may stay
KV_SETTINGS = ("model", "chunk_tokens", "embedder", "kv_cache_dtype", "context_filler", "context_document_tokens")
SETTINGS = (*KV_SETTINGS, "nvme_budget_bytes")
INSTRUCTION = "Answer the question from the passages below.\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Model, directory and settings of an `Engine`.

    Args:
        model: directory, GGUF file, hub id or known name of the model.
        store_dir: folder of the chunk KV (`kv/`), the retrieval index (`index/`) and the profiles (`profiles/`); made when
            missing.
        preset: how much is recomputed, where `fusion` has no ratio. "exact": all, so that every answer is full prefill's.
            "balanced": the loading controller chooses r*, or more where that hides beside loading; without a profile, r*. r* is
            the store's calibrated ratio; without one 0.05, and a blend is widened (blend/widening.py) where that moves its
            first token by more than 0.05 nats; of a model that is too small for that, `loader.quality_ratio`. "high": the same
            from 0.02 nats. "fast": a ratio of 0.05.
        instruction: stands in front of the chunks in every prompt.
        store: budgets of the chunk KV; its folder is the engine's.
        retriever: chunks and embedder; its folder is the engine's.
        fusion: ratio and selector; what is None there is the controller's and the calibration's choice.
        loader: look-ahead and controller settings.

    Raises:
        ConfigError: a value is not allowed.
    """

    model: str
    store_dir: str | os.PathLike[str]
    preset: str = option("balanced", "How much is recomputed, by name; docs/options.md compares them.", choices=PRESETS)
    device: str = option("auto", "auto (CUDA where it is, else the CPU), cpu, cuda or cuda:N.")
    dtype: str = option("auto", "auto: the checkpoint's, if 16-bit and fast on the device, else float32.", choices=DTYPES)
    max_tokens: int | None = option(None, "Most tokens of an answer, unless its request says otherwise; else as many as fit.")
    kv_cache_dtype: str = option("raw", "How chunks' KV is stored; raw is exact. Another's is not found.", choices=CODEC_NAMES)
    prefix_budget_bytes: int = option(512 * MIB, "Bytes of RAM for KV of prompts' beginnings: system messages, conversations.")
    context_filler: str = option(
        "auto", "Passages that chunks' KV is computed after: auto (the package's), none, or a text file; other KV is not found."
    )
    context_document_tokens: int = option(
        DOCUMENT_TOKENS,
        "Window in which a document is read, so that a chunk's KV is computed after its document's earlier text; 0: none.",
    )
    find_passages: bool = option(True, "Find retrieved passages in messages and prompts, and reuse their KV (docs/service.md).")
    allow_unverified: bool = option(False, "Take a model of an unverified family if the built-in check passes.")
    instruction: str = INSTRUCTION
    store: StoreConfig = field(default_factory=StoreConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def __post_init__(self) -> None:
        if not str(self.model).strip():
            raise ConfigError("model", self.model, "a model directory, GGUF file, hub id or known name")
        if not isinstance(self.store_dir, str | os.PathLike) or not os.fspath(self.store_dir):
            raise ConfigError("store_dir", self.store_dir, "name the folder that holds store and index")
        named = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,9}))?", str(self.device), re.ASCII)
        if named is None:
            raise ConfigError("device", self.device, '"auto", "cpu", "cuda" or "cuda:N"')
        if named[0].startswith("cuda"):
            import torch

            if int(named[1] or 0) >= (gpus := torch.cuda.device_count()):
                raise ConfigError("device", self.device, f'not on this machine: torch finds {gpus} GPUs; use "auto" or "cpu"')
        for name, allowed in (("dtype", DTYPES), ("kv_cache_dtype", CODEC_NAMES), ("preset", PRESETS)):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(name, value, f"one of {', '.join(allowed)}")
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens)
        check_whole("prefix_budget_bytes", self.prefix_budget_bytes)
        check_whole("context_document_tokens", self.context_document_tokens, at_least=0)
        if not isinstance(self.context_filler, str) or not self.context_filler.strip():
            raise ConfigError("context_filler", self.context_filler, '"auto", "none", or a text file')
        if not isinstance(self.instruction, str):
            raise ConfigError("instruction", self.instruction, "a text")
        if self.store.directory != StoreConfig().directory or self.retriever.directory is not None:
            raise ConfigError("directory", self.store.directory, "name the folder of an engine as store_dir alone")
        self.store_config()

    def resolve_device(self) -> torch.device:
        """The device that "auto" stands for."""
        import torch  # here: a check of options needs no torch

        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def recompute_ratio(self) -> float | None:
        """The ratio of a request that names none; None leaves it to the loading controller."""
        return PRESETS[self.preset][0] if self.fusion.recompute_ratio is None else self.fusion.recompute_ratio

    def retriever_config(self) -> RetrieverConfig:
        """The retriever's part, in the engine's folder."""
        return replace(self.retriever, directory=Path(self.store_dir) / INDEX_FOLDER)

    def store_config(self) -> StoreConfig:
        """The store's part, in the engine's folder."""
        return replace(self.store, directory=Path(self.store_dir) / KV_FOLDER)

    @property
    def vllm_dir(self) -> Path:
        """The folder of the index of texts that a vLLM over the same store was given."""
        return Path(self.store_dir) / VLLM_FOLDER

    @property
    def profile_dir(self) -> Path:
        """Folder of the profiles that were measured for this store."""
        return Path(self.store_dir) / "profiles"

    @property
    def profile_dirs(self) -> list[Path]:
        """Folders of profiles, the own first; what a service's tenant has not measured is the service's."""
        above = Path(self.store_dir).absolute().parent
        return [self.profile_dir, *([above.with_name("profiles")] if above.name == TENANTS_FOLDER else [])]


def model_name(config: EngineConfig) -> str:
    """The model of a configuration as it is remembered: its path, or its name."""
    model = Path(config.model).expanduser()
    return str(model.resolve()) if model.exists() else config.model


def _settings(config: EngineConfig) -> dict[str, Any]:
    parts = (config, config.retriever, config.store)
    values = {name: getattr(part, name) for name in SETTINGS for part in parts if hasattr(part, name)}
    return {**values, "model": model_name(config)}


def remember_settings(config: EngineConfig) -> None:
    """Note beside a store what its KV is computed with, and its budget, for commands that do not name them.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(Path(config.store_dir) / SETTINGS_FILE) as file:
        file.write(json.dumps(_settings(config)).encode())


def remembered_settings(store_dir: Path) -> dict[str, Any]:
    """Settings that `remember_settings` noted, by option; empty if none can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((store_dir / SETTINGS_FILE).read_bytes())
        if isinstance(found, dict):
            return {name: found[name] for name in SETTINGS if isinstance(found.get(name), str | int)}
    return {}


def has_kv(config: EngineConfig) -> bool:
    """Whether a store has KV, and it was computed as a configuration says."""
    found, asked = remembered_settings(Path(config.store_dir)), _settings(config)
    return Path(config.store_dir, KV_FOLDER).is_dir() and all(found.get(name) == asked[name] for name in KV_SETTINGS)


def remember_new_settings(config: EngineConfig) -> None:
    """Note the settings of a store that has none, and a budget above the noted one, to which later commands would evict."""
    known = remembered_settings(Path(config.store_dir)).get("nvme_budget_bytes", 0)
    if not Path(config.store_dir, SETTINGS_FILE).exists():
        remember_settings(config)
    elif has_kv(config) and config.store.nvme_budget_bytes > known:
        with suppress(OSError):  # a warning tells of each eviction
            remember_settings(config)


def load_fusor(config: EngineConfig) -> Fusor:
    """Load the model of a configuration.

    Raises:
        InputError: no model there.
        UnsupportedModelError: blending is not right on the model.
    """
    from cacheblend.blend import Fusor

    logger.info("loading the model %s", config.model, extra={"stage": "loading the model"})
    return Fusor.from_pretrained(config.model, config.resolve_device(), config.dtype, allow_unverified=config.allow_unverified)
