"""What an engine is made of."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cacheblend.base.errors import ConfigError
from cacheblend.blend import ChunkContext, FusionConfig
from cacheblend.blend.models import DTypeOption
from cacheblend.blend.precompute import DOCUMENT_TOKENS
from cacheblend.loader import LoaderConfig
from cacheblend.retriever import RetrieverConfig
from cacheblend.store import NamespaceShare, StoreConfig
from cacheblend.store.codecs import CODECS
from cacheblend.store.config import MIB, check_bytes, check_share
from cacheblend.store.eviction import RecentNamespaces, TierBudget

from .request import UNSALTED

DTYPES: dict[str, DTypeOption] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DEVICES = '"auto", "cpu", "cuda" or "cuda:N"'
KV_FOLDER, INDEX_FOLDER = "kv", "index"  # of a store folder
ON_MISS = ("recompute", "precompute")
INSTRUCTION = "Answer the question from the passages below.\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Model, directory and settings of an `Engine`.

    Args:
        model: directory, GGUF file, hub id or known name of the model.
        store_dir: folder of the chunk KV (`kv/`), the retrieval index (`index/`) and the profiles (`profiles/`); made when
            missing.
        device: "auto" takes CUDA where it is, else the CPU; or a torch device name.
        dtype: "auto", "float32", "bfloat16" or "float16"; for "auto" see `choose_dtype`.
        chunk_tokens: size of a chunk; see `RetrieverConfig`.
        chunk_overlap_tokens: see `RetrieverConfig`.
        embedder: see `RetrieverConfig`.
        ram_budget_bytes: see `StoreConfig`.
        nvme_budget_bytes: see `StoreConfig`.
        direct_reads: see `StoreConfig`.
        prefix_budget_bytes: keys and values held in RAM of what prompts begin with: system messages, conversations so far.
        unsalted_share: 0..1 of each of the three budgets, reserved for KV without a cache salt: ingested documents above all.
        salt_share: 0..1 of each budget, reserved for each cache salt, of those used last as many as fit beside that. What is
            not used of a reserve is lent to others.
        kv_cache_dtype: how chunks' KV is stored: "raw" (exact), "fp8_e4m3", "int8", "int4". KV of another is not found again.
        recompute_ratio: share of reusable tokens to recompute, 0..1; None leaves it to the loading controller, which takes
            r*, or more where loading would take longer anyway; without a profile, r*. r* is the store's calibrated ratio, or
            `loader.quality_ratio`; see `calibrated`.
        selector: which tokens; see `FusionConfig`. None takes the store's calibrated selector, or else the package's default.
        on_miss: what becomes of chunks whose KV is not stored. "recompute": they are recomputed in the prompt, which is exact,
            and their KV is computed alone and stored afterwards, in the background. "precompute": the KV of those that need no
            reading of their document (they stand first in it, or it is not known) is computed alone at once, stored, and
            blended as if it had been there: less work, and the answer that later requests get, but for a lossy codec.
        instruction: stands in front of the chunks in every prompt.
        context_filler: the passages that every chunk's KV is computed after, behind instruction and chat template: "auto",
            "none" or a file; see `chunk_context`. Another filler's KV is not found again.
        context_document_tokens: a document is read in windows of so many tokens, so that a chunk's KV is computed after the
            document's earlier text; 0 for none of it. KV of another size may not be found again.
        max_tokens: most tokens to generate, unless a question says otherwise; None for as many as fit in the model's positions.
        allow_unverified: take a model of an unverified family if the built-in check passes.
        loader: look-ahead and controller settings.

    Raises:
        ConfigError: a value is not allowed.
    """

    model: str
    store_dir: str | os.PathLike[str]
    device: str = "auto"
    dtype: str = "auto"
    chunk_tokens: int = RetrieverConfig().chunk_tokens
    chunk_overlap_tokens: int = RetrieverConfig().chunk_overlap_tokens
    embedder: str = RetrieverConfig().embedder
    ram_budget_bytes: int = StoreConfig(directory=".").ram_budget_bytes
    nvme_budget_bytes: int = StoreConfig(directory=".").nvme_budget_bytes
    direct_reads: bool = False
    prefix_budget_bytes: int = 512 * MIB
    unsalted_share: float = 0.5
    salt_share: float = 0.05
    kv_cache_dtype: str = "raw"
    recompute_ratio: float | None = None
    selector: str | None = None
    on_miss: str = ON_MISS[0]
    instruction: str = INSTRUCTION
    context_filler: str = "auto"
    context_document_tokens: int = DOCUMENT_TOKENS
    max_tokens: int | None = None
    allow_unverified: bool = False
    loader: LoaderConfig = field(default_factory=LoaderConfig)

    def __post_init__(self) -> None:
        if not str(self.model).strip():
            raise ConfigError("model", self.model, "a model directory, GGUF file, hub id or known name")
        if not isinstance(self.store_dir, str | os.PathLike) or not os.fspath(self.store_dir):
            raise ConfigError("store_dir", self.store_dir, "name the folder that holds store and index")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        try:
            device = self.resolve_device()
        except (RuntimeError, TypeError) as error:
            raise ConfigError("device", self.device, _DEVICES) from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError("device", self.device, _DEVICES)
        gpus = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError("device", self.device, f'not on this machine: torch finds {gpus} GPUs; use "auto" or "cpu"')
        if self.kv_cache_dtype not in CODECS:
            raise ConfigError("kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(CODECS)}")
        if self.on_miss not in ON_MISS:
            raise ConfigError("on_miss", self.on_miss, f"one of {', '.join(ON_MISS)}")
        if self.max_tokens is not None:
            check_max_tokens(self.max_tokens)
        for name in ("ram_budget_bytes", "nvme_budget_bytes", "prefix_budget_bytes"):
            check_bytes(name, getattr(self, name))
        check_share("unsalted_share", self.unsalted_share)
        check_share("salt_share", self.salt_share)
        if self.unsalted_share + self.salt_share > 1:
            raise ConfigError("salt_share", self.salt_share, f"at most 1 with unsalted_share={self.unsalted_share:g} together")
        if not isinstance(self.context_filler, str) or not self.context_filler.strip():
            raise ConfigError("context_filler", self.context_filler, '"auto", "none", or a text file')
        ChunkContext(document_tokens=self.context_document_tokens)
        self.retriever_config()
        self.store_config()
        self.fusion_config(self.recompute_ratio)

    def resolve_device(self) -> torch.device:
        """The device that "auto" stands for."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def retriever_config(self) -> RetrieverConfig:
        """The retriever's part."""
        return RetrieverConfig(
            directory=Path(self.store_dir) / INDEX_FOLDER,
            chunk_tokens=self.chunk_tokens,
            chunk_overlap_tokens=self.chunk_overlap_tokens,
            embedder=self.embedder,
        )

    def store_config(self) -> StoreConfig:
        """The store's part."""
        return StoreConfig(
            directory=Path(self.store_dir) / KV_FOLDER,
            ram_budget_bytes=self.ram_budget_bytes,
            nvme_budget_bytes=self.nvme_budget_bytes,
            ram_shares=self._shares(self.ram_budget_bytes),
            nvme_shares=self._shares(self.nvme_budget_bytes),
            recent_share=self.salt_share,
            direct_reads=self.direct_reads,
        )

    def prefix_budget(self) -> TierBudget:
        """What prefix blocks may hold."""
        budget_bytes = self.prefix_budget_bytes
        budget = TierBudget(budget_bytes, self._shares(budget_bytes), int(budget_bytes * self.salt_share))
        return replace(budget, recent=RecentNamespaces(budget.most_recent))

    def _shares(self, budget_bytes: int) -> dict[str, NamespaceShare]:
        return {UNSALTED: NamespaceShare(reserved_bytes=int(budget_bytes * self.unsalted_share))}

    @property
    def profile_dir(self) -> Path:
        """Folder of the measured profiles."""
        return Path(self.store_dir) / "profiles"

    def fusion_config(self, recompute_ratio: float | None) -> FusionConfig:
        """The fusor's part, at a ratio; None for r*."""
        ratio = self.loader.quality_ratio if recompute_ratio is None else recompute_ratio
        return FusionConfig(recompute_ratio=ratio, selector=FusionConfig().selector if self.selector is None else self.selector)


def check_max_tokens(value: object) -> None:
    """Refuse anything but a positive whole number.

    Raises:
        ConfigError: so.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError("max_tokens", value, "a whole number of at least 1")
