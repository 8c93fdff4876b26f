"""Haystack's components: the engine's retriever, and generators that blend the stored KV of the chunks in their prompts.

As in `integrations/langchain.py`: chunks that the retriever found are looked for in the prompt, word for word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cacheblend.base.extras import needs_extra

with needs_extra("haystack"):
    from haystack import Document, component
    from haystack.dataclasses import ChatMessage, StreamingCallbackT, StreamingChunk

from cacheblend.base.errors import InputError
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message

from .chat import EngineChat, report, with_end

__all__ = ["CacheBlendChatGenerator", "CacheBlendGenerator", "CacheBlendRetriever"]

ROLES = {"system": "system", "user": "user", "assistant": "assistant"}


@component
class CacheBlendRetriever:
    r"""Finds the engine's chunks nearest a question, as Haystack documents.

    In a prompt template, put each document's `content` in as it is and two line breaks after it:
    `{% for document in documents %}{{ document.content }}\n\n{% endfor %}`.

    Args:
        engine: open; its documents are ingested.
        top_k: chunks to find, or as many as there are.
    """

    def __init__(self, engine: Engine, top_k: int = 6) -> None:
        self._engine, self._top_k = engine, top_k

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """Search."""
        documents = []
        for scored in self._engine.search(query, self._top_k if top_k is None else top_k):
            chunk = scored.chunk
            meta: dict[str, object] = {"document_id": chunk.document_id, "title": chunk.title, "position": chunk.position}
            meta |= scored.place.as_dict()
            id_ = f"{chunk.document_id}:{chunk.position}"
            documents.append(Document(id=id_, content=chunk.text, meta=meta, score=scored.score))
        return {"documents": documents}


class _Generating:
    """What both generators share: the options of every call, and a chat's pieces."""

    def __init__(
        self,
        engine: Engine,
        generation_kwargs: Mapping[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> None:
        self._chat, self._options = EngineChat(engine), dict(generation_kwargs or {})
        self._callback = streaming_callback

    def _answer(
        self, messages: list[Message], generation_kwargs: Mapping[str, Any] | None, callback: Any
    ) -> tuple[str, dict[str, Any]]:
        """The whole text, and its metadata; `callback` gets each piece."""
        options = {**self._options, **(generation_kwargs or {})}
        stop, documents = options.pop("stop", None), options.pop("documents", None)
        callback, text, meta = callback or self._callback, "", dict[str, Any]()
        for index, (piece, done) in enumerate(self._chat_pieces(messages, options, stop, documents)):
            text += piece
            if done is not None:
                meta = report(done)
            if callback is not None:
                reason = None if done is None else done.finish_reason
                callback(StreamingChunk(content=piece, index=0, start=index == 0, finish_reason=reason))
        usage = {name: meta.pop(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")}
        return text, {"model": self._chat.engine.config.model, "index": 0, "usage": usage, **meta}

    def _chat_pieces(self, messages: list[Message], options: Mapping[str, Any], stop: Any, documents: Any) -> Any:
        return with_end(self._chat.stream(messages, options, stop=stop, documents=documents))


@component
class CacheBlendGenerator(_Generating):
    """Answers a prompt, as `PromptBuilder` makes it.

    Args:
        engine: open.
        generation_kwargs: options of every call: those of `integrations/chat.py`, `stop` and `documents`.
        streaming_callback: called with each piece.
    """

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(
        self, prompt: str, generation_kwargs: dict[str, Any] | None = None, streaming_callback: StreamingCallbackT | None = None
    ) -> dict[str, list[Any]]:
        """Answer."""
        text, meta = self._answer([Message("user", prompt)], generation_kwargs, streaming_callback)
        return {"replies": [text], "meta": [meta]}

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    async def run_async(
        self, prompt: str, generation_kwargs: dict[str, Any] | None = None, streaming_callback: StreamingCallbackT | None = None
    ) -> dict[str, list[Any]]:
        """Answer; the event loop goes on meanwhile."""
        return await asyncio.to_thread(CacheBlendGenerator.run, self, prompt, generation_kwargs, streaming_callback)


@component
class CacheBlendChatGenerator(_Generating):
    """Answers a chat, as `ChatPromptBuilder` makes it; for its arguments see `CacheBlendGenerator`."""

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer."""
        text, meta = self._answer([_turn(message) for message in messages], generation_kwargs, streaming_callback)
        return {"replies": [ChatMessage.from_assistant(text, meta=meta)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage],
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer; the event loop goes on meanwhile."""
        return await asyncio.to_thread(CacheBlendChatGenerator.run, self, messages, generation_kwargs, streaming_callback)


def _turn(message: ChatMessage) -> Message:
    if message.role.value not in ROLES or len(message.texts) != len(message._content):
        raise InputError(f"a {message.role.value} message cannot be answered, or not all of it is text; give text alone")
    return Message(ROLES[message.role.value], "".join(message.texts))
