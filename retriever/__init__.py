"""Text -> chunks -> vectors -> the chunks nearest a question."""

from .catalogue import CataloguedDocument
from .chunk import Chunk, ScoredChunk, in_reading_order
from .config import DEFAULT_EMBEDDER, RetrieverConfig
from .document import Document
from .embedder import Embedder, SentenceTransformerEmbedder, checked_between_batches
from .plain_tokenizer import PlainTokenizer
from .retriever import AddReport, EmbeddedDocument, Retriever
from .splitter import Splitter

__all__ = [
    "DEFAULT_EMBEDDER",
    "AddReport",
    "CataloguedDocument",
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
