"""LlamaIndex's interfaces: the engine's retriever, and an LLM that blends the stored KV of the chunks in its messages.

As in `integrations/langchain.py`: chunks that the retriever found are looked for in the prompt, word for word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cacheblend.base.extras import needs_extra

with needs_extra("llamaindex"):
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
    )
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cacheblend.base.errors import InputError
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import MAX_NEW_TOKENS, Message

from .chat import OPTIONS, EngineChat, in_threads, report, with_end

__all__ = ["CacheBlendLLM", "CacheBlendRetriever"]

_Piece = tuple[str, str, dict[str, Any]]
ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
}


class CacheBlendRetriever(BaseRetriever):
    """Finds the engine's chunks nearest a question, as nodes whose text is the chunk's, and nothing else for the model.

    Args:
        engine: open; its documents are ingested.
        similarity_top_k: chunks to find, or as many as there are.
    """

    def __init__(self, engine: Engine, similarity_top_k: int = 6, **options: Any) -> None:
        super().__init__(**options)
        self._engine, self._top_k = engine, similarity_top_k

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = []
        for scored in self._engine.search(query_bundle.query_str, self._top_k):
            chunk = scored.chunk
            metadata: dict[str, Any] = {"document_id": chunk.document_id, "title": chunk.title, "position": chunk.position}
            metadata |= scored.place.as_dict()
            node = TextNode(
                id_=f"{chunk.document_id}:{chunk.position}",
                text=chunk.text,
                metadata=metadata,
                excluded_llm_metadata_keys=list(metadata),  # a title before the text would be another text
                excluded_embed_metadata_keys=list(metadata),
            )
            nodes.append(NodeWithScore(node=node, score=scored.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class CacheBlendLLM(CustomLLM):
    """Answers prompts and chats over the stored KV of the chunks that they hold; see `ChatCacheBlend` of LangChain.

    Options of a call are those of `integrations/chat.py`, and `stop` and `documents`.

    Args:
        engine: open.
        method: see `Engine.answer`.
        recompute_ratio: see `Engine.answer`.
        max_tokens: see `Engine.answer`.
        temperature: see `Engine.answer`.
    """

    engine: Any = Field(exclude=True)  # an Engine
    method: str = "blend"
    recompute_ratio: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    _chat: EngineChat = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Called by pydantic."""
        super().model_post_init(context)
        self._chat = EngineChat(self.engine)

    @classmethod
    def class_name(cls) -> str:
        """Its name for LlamaIndex."""
        return "CacheBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex packs contexts by."""
        window = self.engine.fusor.max_positions or 2**20
        output = min(self.max_tokens or self.engine.config.max_tokens or window // 4, MAX_NEW_TOKENS)
        return LLMMetadata(
            context_window=window, num_output=output, is_chat_model=True, model_name=str(self.engine.config.model)
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        return _chat_response(*self._answer(_turns(messages), kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat; the event loop goes on meanwhile."""
        return _chat_response(*await asyncio.to_thread(self._answer, _turns(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a chat, piece by piece."""
        return (_chat_response(*piece) for piece in self._pieces(_turns(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Answer a chat, piece by piece; the event loop goes on meanwhile."""
        return (_chat_response(*piece) async for piece in in_threads(self._pieces(_turns(messages), kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt, as a chat of one message."""
        return _text_response(*self._answer([Message("user", prompt)], kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt; the event loop goes on meanwhile."""
        return _text_response(*await asyncio.to_thread(self._answer, [Message("user", prompt)], kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt, piece by piece."""
        return (_text_response(*piece) for piece in self._pieces([Message("user", prompt)], kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Answer a prompt, piece by piece; the event loop goes on meanwhile."""
        return (_text_response(*piece) async for piece in in_threads(self._pieces([Message("user", prompt)], kwargs)))

    def _answer(self, messages: Sequence[Message], given: Mapping[str, Any]) -> _Piece:
        *_, last = self._pieces(messages, given)
        return last

    def _pieces(self, messages: Sequence[Message], given: Mapping[str, Any]) -> Iterator[_Piece]:
        """The text so far, what is new of it, and at the end what it came of."""
        fields = {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}
        options = {**fields, **given}
        stop, documents = options.pop("stop", None), options.pop("documents", None)
        text = ""
        for piece, done in with_end(self._chat.stream(messages, options, stop=stop, documents=documents)):
            text += piece
            yield text, piece, {} if done is None else report(done)


def _chat_response(text: str, delta: str, meta: dict[str, Any]) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, additional_kwargs=meta)


def _text_response(text: str, delta: str, meta: dict[str, Any]) -> CompletionResponse:
    return CompletionResponse(text=text, delta=delta, additional_kwargs=meta)


def _turns(messages: Sequence[ChatMessage]) -> list[Message]:
    for message in messages:
        if message.role not in ROLES or any(block.block_type != "text" for block in message.blocks):
            raise InputError(f"a {message.role.value} message cannot be answered, or not all of it is text; give text alone")
    return [Message(ROLES[message.role], message.content or "") for message in messages]
