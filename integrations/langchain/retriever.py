"""The engine's retriever for LangChain chains."""

from __future__ import annotations

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, SkipValidation

from cacheblend.service.engine.engine import Engine


class CacheBlendRetriever(BaseRetriever):
    """Finds the engine's chunks nearest a question, as LangChain documents.

    `ChatCacheBlend` answers over them from their stored KV, which it finds by the document's id and the chunk's position.

    Args:
        engine: open; its documents are ingested.
        top_k: chunks to find, or as many as there are.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    engine: SkipValidation[Engine]
    top_k: int = 6

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [
            Document(
                page_content=scored.chunk.text,
                metadata={
                    "document_id": scored.chunk.document_id,
                    "title": scored.chunk.title,
                    "position": scored.chunk.position,
                    "distance": scored.distance,
                },
            )
            for scored in self.engine.retriever.search(query, self.top_k)
        ]
