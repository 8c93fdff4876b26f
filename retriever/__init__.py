"""Text -> chunks -> vectors -> the chunks nearest a question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import DEFAULT_EMBEDDER as DEFAULT_EMBEDDER
    from .config import RetrieverConfig as RetrieverConfig
    from .document import Chunk as Chunk
    from .document import Document as Document
    from .document import EmbeddedDocument as EmbeddedDocument
    from .document import ScoredChunk as ScoredChunk
    from .embedder import Embedder as Embedder
    from .embedder import SentenceTransformerEmbedder as SentenceTransformerEmbedder
    from .embedder import checked_between_batches as checked_between_batches
    from .retriever import Retriever as Retriever
    from .retriever import in_reading_order as in_reading_order
    from .splitter import PlainTokenizer as PlainTokenizer
    from .splitter import Splitter as Splitter

__getattr__ = lazy_names(__name__, __file__, extra="rag")
