"""Keeps the KV of every text chunk, by content hash, in RAM and on NVMe."""

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

try:
    import fcntl as _fcntl  # the locks between processes
except ModuleNotFoundError as error:
    raise ImportError("CacheBlend needs Linux or macOS: its store needs POSIX locks. On Windows run it in WSL 2.") from error

if TYPE_CHECKING:
    from .chunk import PASSAGES, ChunkKey, ChunkKV, KVHandle, context_digest
    from .codecs import LayerPair
    from .config import StoreConfig
    from .kv_store import KVStore
    from .nvme_tier import VerifyReport
    from .prefix_blocks import BLOCK_TOKENS, STATE, BlockChain, PrefixBlocks, PrefixRun
    from .tiers import RAM, Placement
    from .write_queue import DocumentVersion

__getattr__ = lazy_names(__name__, __file__)
