"""Text -> chunks -> vectors -> the chunks nearest a question."""

from __future__ import annotations

from cacheblend.base.errors import needs_extra

with needs_extra("rag"):
    from .catalog import CatalogedDocument
    from .config import DEFAULT_EMBEDDER, RetrieverConfig
    from .document import Chunk, Document, EmbeddedDocument, ScoredChunk, in_reading_order
    from .embedder import Embedder, SentenceTransformerEmbedder, checked_between_batches
    from .retriever import Retriever
    from .splitter import PlainTokenizer, Splitter

__all__ = [
    "DEFAULT_EMBEDDER",
    "CatalogedDocument",
    "Chunk",
    "Document",
    "EmbeddedDocument",
    "Embedder",
    "PlainTokenizer",
    "Retriever",
    "RetrieverConfig",
    "ScoredChunk",
    "SentenceTransformerEmbedder",
    "Splitter",
    "checked_between_batches",
    "in_reading_order",
]
