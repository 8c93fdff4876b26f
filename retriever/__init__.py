"""Text -> chunks -> vectors -> the chunks nearest a question."""

from typing import TYPE_CHECKING

from cacheblend.base.lazy import lazy_names

if TYPE_CHECKING:
    from .config import DEFAULT_EMBEDDER, RetrieverConfig
    from .document import Chunk, Document, EmbeddedDocument, ScoredChunk
    from .embedder import Embedder, SentenceTransformerEmbedder, checked_between_batches
    from .retriever import Retriever, in_reading_order
    from .splitter import PlainTokenizer, Splitter

__getattr__ = lazy_names(__name__, __file__, extra="rag")
