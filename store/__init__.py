"""Keeps the KV of every text chunk, by content hash, in RAM and on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

try:
    import fcntl as _fcntl  # noqa: F401  # the locks between processes
except ModuleNotFoundError as error:
    raise ImportError(
        "CacheBlend needs Linux or macOS: its store locks and syncs files as POSIX has it. On Windows run it in WSL 2."
    ) from error

if TYPE_CHECKING:
    from cacheblend.base.errors import CacheBlendError as CacheBlendError
    from cacheblend.base.errors import ConfigError as ConfigError
    from cacheblend.base.errors import DamagedEntryError as DamagedEntryError
    from cacheblend.base.errors import InputError as InputError
    from cacheblend.base.errors import StoreDirectoryError as StoreDirectoryError
    from cacheblend.base.errors import StoreError as StoreError
    from cacheblend.base.errors import StoreFullError as StoreFullError

    from .catalog import CatalogEntry as CatalogEntry
    from .catalog import StoredDocument as StoredDocument
    from .chunk import ChunkKV as ChunkKV
    from .chunk import EncodedLayer as EncodedLayer
    from .chunk import KVHandle as KVHandle
    from .chunk import LayerPair as LayerPair
    from .config import StoreConfig as StoreConfig
    from .documents import StoreDocuments as StoreDocuments
    from .eviction import NamespaceShare as NamespaceShare
    from .key import ChunkKey as ChunkKey
    from .key import context_digest as context_digest
    from .kv_store import KVStore as KVStore
    from .prefix_blocks import BLOCK_TOKENS as BLOCK_TOKENS
    from .prefix_blocks import BlockChain as BlockChain
    from .prefix_blocks import PrefixBlocks as PrefixBlocks
    from .prefix_blocks import PrefixRun as PrefixRun
    from .prefix_blocks import PrefixStats as PrefixStats
    from .prefix_blocks import chain_root as chain_root
    from .tiers import CACHE_TIERS as CACHE_TIERS
    from .tiers import REMOTE as REMOTE
    from .tiers import CacheTier as CacheTier
    from .tiers import KVTier as KVTier
    from .tiers import Placement as Placement
    from .tiers import StoreStats as StoreStats
    from .tiers import TierStats as TierStats
    from .tiers import tiers_in_memory as tiers_in_memory
    from .verify import VerifyReport as VerifyReport
    from .write_queue import DocumentVersion as DocumentVersion

_MODULES = {
    "cacheblend.base.errors": (
        "CacheBlendError",
        "ConfigError",
        "DamagedEntryError",
        "InputError",
        "StoreDirectoryError",
        "StoreError",
        "StoreFullError",
    ),
    ".catalog": ("CatalogEntry", "StoredDocument"),
    ".chunk": ("ChunkKV", "EncodedLayer", "KVHandle", "LayerPair"),
    ".config": ("StoreConfig",),
    ".documents": ("StoreDocuments",),
    ".eviction": ("NamespaceShare",),
    ".key": ("ChunkKey", "context_digest"),
    ".kv_store": ("KVStore",),
    ".prefix_blocks": ("BLOCK_TOKENS", "BlockChain", "PrefixBlocks", "PrefixRun", "PrefixStats", "chain_root"),
    ".tiers": ("CACHE_TIERS", "REMOTE", "CacheTier", "KVTier", "Placement", "StoreStats", "TierStats", "tiers_in_memory"),
    ".verify": ("VerifyReport",),
    ".write_queue": ("DocumentVersion",),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)
