"""Haystack's components: the engine's retriever, and generators that blend the stored KV of the chunks in their prompts.

As in `integrations/langchain.py`: chunks that the retriever found are looked for in the prompt, word for word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from cacheblend.base.extras import needs_extra

with needs_extra("haystack"):
    from haystack import Document, component
    from haystack.dataclasses import ChatMessage, StreamingCallbackT, StreamingChunk, select_streaming_callback

from cacheblend.base.errors import InputError
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message

from .chat import EngineChat, in_threads, report, with_end

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
    """Base of both generators: the options of every call, and a chat's pieces."""

    def __init__(
        self,
        engine: Engine,
        generation_kwargs: Mapping[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> None:
        self._chat, self._options = EngineChat(engine), dict(generation_kwargs or {})
        self._callback = streaming_callback

    def _answer(
        self,
        messages: list[Message],
        generation_kwargs: Mapping[str, Any] | None,
        streaming_callback: StreamingCallbackT | None,
    ) -> tuple[str, dict[str, Any]]:
        """The whole text, and its metadata; the callback gets each piece.

        Raises:
            ValueError: the callback is a coroutine.
        """
        callback = select_streaming_callback(self._callback, streaming_callback, requires_async=False)
        chunks = []
        for chunk in self._chunks(messages, generation_kwargs):
            chunks.append(chunk)
            if callback is not None:
                callback(chunk)
        return self._whole(chunks)

    async def _answer_async(
        self,
        messages: list[Message],
        generation_kwargs: Mapping[str, Any] | None,
        streaming_callback: StreamingCallbackT | None,
    ) -> tuple[str, dict[str, Any]]:
        """Call the callback on the event loop; a coroutine is awaited before the next piece."""
        callback = select_streaming_callback(self._callback, streaming_callback, requires_async=True)
        chunks = []
        async with aclosing(in_threads(self._chunks(messages, generation_kwargs))) as coming:
            async for chunk in coming:
                chunks.append(chunk)
                if callback is not None and (waiting := callback(chunk)) is not None:
                    await waiting
        return self._whole(chunks)

    def _chunks(self, messages: list[Message], generation_kwargs: Mapping[str, Any] | None) -> Iterator[StreamingChunk]:
        """The answer's pieces; the last one has what the answer came of."""
        options = {**self._options, **(generation_kwargs or {})}
        stop, documents = options.pop("stop", None), options.pop("documents", None)
        for index, (piece, done) in enumerate(with_end(self._chat.stream(messages, options, stop=stop, documents=documents))):
            meta = {} if done is None else report(done)
            yield StreamingChunk(content=piece, meta=meta, index=0, start=index == 0, finish_reason=meta.get("finish_reason"))

    def _whole(self, chunks: Sequence[StreamingChunk]) -> tuple[str, dict[str, Any]]:
        meta = dict(chunks[-1].meta)
        usage = {name: meta.pop(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")}
        text = "".join(chunk.content for chunk in chunks)
        return text, {"model": self._chat.engine.config.model, "index": 0, "usage": usage, **meta}


@component
class CacheBlendGenerator(_Generating):
    """Answers a prompt, as `PromptBuilder` makes it.

    Args:
        engine: open.
        generation_kwargs: options of every call: those of `integrations/chat.py`, `stop` and `documents`.
        streaming_callback: called with each piece; `run_async` awaits one that is a coroutine, `run` refuses it.
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
        text, meta = await self._answer_async([Message("user", prompt)], generation_kwargs, streaming_callback)
        return {"replies": [text], "meta": [meta]}


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
        text, meta = await self._answer_async([_turn(message) for message in messages], generation_kwargs, streaming_callback)
        return {"replies": [ChatMessage.from_assistant(text, meta=meta)]}


def _turn(message: ChatMessage) -> Message:
    if message.role.value not in ROLES or len(message.texts) != len(message._content):
        raise InputError(f"a {message.role.value} message cannot be answered, or not all of it is text; give text alone")
    return Message(ROLES[message.role.value], "".join(message.texts))
