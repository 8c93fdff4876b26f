"""Text -> chunks -> vectors -> the chunks nearest a question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from .catalog_rows import CatalogedDocument as CatalogedDocument
    from .config import DEFAULT_EMBEDDER as DEFAULT_EMBEDDER
    from .config import RetrieverConfig as RetrieverConfig
    from .document import Chunk as Chunk
    from .document import Document as Document
    from .document import ScoredChunk as ScoredChunk
    from .document import in_reading_order as in_reading_order
    from .embedder import Embedder as Embedder
    from .embedder import SentenceTransformerEmbedder as SentenceTransformerEmbedder
    from .embedder import checked_between_batches as checked_between_batches
    from .retriever import EmbeddedDocument as EmbeddedDocument
    from .retriever import Retriever as Retriever
    from .splitter import PlainTokenizer as PlainTokenizer
    from .splitter import Splitter as Splitter

_MODULES = {
    ".config": ("DEFAULT_EMBEDDER", "RetrieverConfig"),
    ".document": ("Chunk", "Document", "ScoredChunk", "in_reading_order"),
    ".catalog_rows": ("CatalogedDocument",),
    ".embedder": ("Embedder", "SentenceTransformerEmbedder", "checked_between_batches"),
    ".retriever": ("EmbeddedDocument", "Retriever"),
    ".splitter": ("PlainTokenizer", "Splitter"),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES, extra="rag")
