"""Keeps the KV of every text chunk, by content hash, in RAM and on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

try:
    import fcntl as _fcntl  # noqa: F401  # the locks between processes
except ModuleNotFoundError as error:
    raise ImportError("CacheBlend needs Linux or macOS: its store needs POSIX locks. On Windows run it in WSL 2.") from error

if TYPE_CHECKING:
    from .chunk import PASSAGES as PASSAGES
    from .chunk import ChunkKey as ChunkKey
    from .chunk import ChunkKV as ChunkKV
    from .chunk import KVHandle as KVHandle
    from .chunk import context_digest as context_digest
    from .codecs import LayerPair as LayerPair
    from .config import StoreConfig as StoreConfig
    from .kv_store import KVStore as KVStore
    from .nvme_tier import VerifyReport as VerifyReport
    from .prefix_blocks import BLOCK_TOKENS as BLOCK_TOKENS
    from .prefix_blocks import STATE as STATE
    from .prefix_blocks import BlockChain as BlockChain
    from .prefix_blocks import PrefixBlocks as PrefixBlocks
    from .prefix_blocks import PrefixRun as PrefixRun
    from .tiers import RAM as RAM
    from .tiers import Placement as Placement
    from .write_queue import DocumentVersion as DocumentVersion

__getattr__ = lazy_names(__name__, __file__)
