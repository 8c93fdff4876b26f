"""Haystack's components: the engine's retriever, and a generator that blends the stored KV of the chunks in its messages.

As in `integrations/langchain.py`: stored chunks and other passages are found in the prompt.
"""

from collections.abc import Mapping
from typing import Any

from cacheblend.base.errors import needs_extra

with needs_extra("haystack"):
    from haystack import Document, component
    from haystack.dataclasses import ChatMessage, StreamingCallbackT, StreamingChunk, TextContent, select_streaming_callback

from cacheblend.retriever import ScoredChunk
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message

from .chat import EngineChat, chunk_metadata, message_of, report

__all__ = ["CacheBlendChatGenerator", "CacheBlendRetriever"]

ROLES = ("system", "user", "assistant")


@component
class CacheBlendRetriever:
    """Finds the engine's chunks nearest a question, as Haystack documents.

    It finds `top_k` chunks, or as many as there are, of documents whose metadata meet `filters`, see `MetadataFilter.of`.
    """

    def __init__(self, engine: Engine, top_k: int = 6, filters: dict[str, Any] | None = None) -> None:
        self._engine, self._top_k, self._filters = engine, top_k, filters

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None, filters: dict[str, Any] | None = None) -> dict[str, list[Document]]:
        found = self._engine.search(query, self._top_k if top_k is None else top_k, filters or self._filters)
        return {"documents": [_document(one) for one in found]}


@component
class CacheBlendChatGenerator:
    """Answers a chat, as `ChatPromptBuilder` makes it.

    Args:
        generation_kwargs: options of every call, those of `integrations/chat.py`.
        streaming_callback: called with each piece; no coroutine, since an asynchronous pipeline runs this in a thread.
    """

    def __init__(
        self,
        engine: Engine,
        generation_kwargs: Mapping[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> None:
        self._chat, self._options, self._callback = EngineChat(engine), dict(generation_kwargs or {}), streaming_callback

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer; raises ValueError if the callback is a coroutine."""
        callback = select_streaming_callback(self._callback, streaming_callback, requires_async=False)
        options = {**self._options, **(generation_kwargs or {})}
        pieces, meta = list[str](), dict[str, Any]()
        for piece, done in self._chat.stream([_message(message) for message in messages], options):
            meta = {} if done is None else report(done)
            if callback is not None:
                end = meta.get("finish_reason")
                callback(StreamingChunk(content=piece, meta=dict(meta), index=0, start=not pieces, finish_reason=end))
            pieces.append(piece)
        usage = {name: meta.pop(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")}
        meta |= {"model": self._chat.engine.config.model, "index": 0, "usage": usage}
        return {"replies": [ChatMessage.from_assistant("".join(pieces), meta=meta)]}


def _document(found: ScoredChunk) -> Document:
    id_ = f"{found.chunk.document_id}:{found.chunk.position}"
    return Document(id=id_, content=found.chunk.text, meta=chunk_metadata(found), score=found.score)


def _message(message: ChatMessage) -> Message:
    role, texts = message.role.value, [part.text if isinstance(part, TextContent) else None for part in message._content]
    return message_of(role if role in ROLES else None, role, texts)
