"""Keeps the KV of every text chunk, by content hash, in RAM and on NVMe."""

from __future__ import annotations

try:
    import fcntl as _fcntl  # noqa: F401  # the locks between processes
except ModuleNotFoundError as error:
    raise ImportError(
        "CacheBlend needs Linux or macOS: its store locks and syncs files as POSIX has it. On Windows run it in WSL 2."
    ) from error

from cacheblend.base.errors import ConfigError, DamagedEntryError, InputError, StoreDirectoryError, StoreError, StoreFullError

from .catalog import CatalogEntry, StoredDocument
from .chunk import ChunkKey, ChunkKV, KVHandle, context_digest
from .codecs import LayerPair
from .config import StoreConfig
from .kv_store import KVStore
from .nvme_tier import VerifyReport
from .prefix_blocks import BLOCK_TOKENS, BlockChain, PrefixBlocks, PrefixRun, chain_root
from .tiers import CACHE_TIERS, CacheTier, Placement, StoreStats, tiers_in_memory
from .write_queue import DocumentVersion

__all__ = [
    "BLOCK_TOKENS",
    "CACHE_TIERS",
    "BlockChain",
    "CacheTier",
    "CatalogEntry",
    "ChunkKV",
    "ChunkKey",
    "ConfigError",
    "DamagedEntryError",
    "DocumentVersion",
    "InputError",
    "KVHandle",
    "KVStore",
    "LayerPair",
    "Placement",
    "PrefixBlocks",
    "PrefixRun",
    "StoreConfig",
    "StoreDirectoryError",
    "StoreError",
    "StoreFullError",
    "StoreStats",
    "StoredDocument",
    "VerifyReport",
    "chain_root",
    "context_digest",
    "tiers_in_memory",
]
