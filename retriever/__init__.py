"""Text -> chunks -> vectors -> the chunks nearest a question."""

from cacheblend.base.extras import needs_extra

from .config import DEFAULT_EMBEDDER, RetrieverConfig
from .document import Chunk, Document, ScoredChunk, in_reading_order

with needs_extra("rag"):
    from .catalog_rows import CatalogedDocument
    from .embedder import Embedder, SentenceTransformerEmbedder, checked_between_batches
    from .retriever import AddReport, EmbeddedDocument, Retriever
    from .splitter import PlainTokenizer, Splitter

__all__ = [
    "DEFAULT_EMBEDDER",
    "AddReport",
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
