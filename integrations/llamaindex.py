"""LlamaIndex's interfaces: the engine's retriever, and an LLM that blends the stored KV of the chunks in its messages.

As in `integrations/langchain.py`: stored chunks and other passages are found in the prompt.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from cacheblend.base.errors import needs_extra

with needs_extra("llamaindex"):
    from llama_index.core.base.llms import types
    from llama_index.core.base.llms.generic_utils import chat_to_completion_decorator, stream_chat_to_completion_decorator
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata, MessageRole
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import MAX_NEW_TOKENS, Message

from .chat import OPTIONS, EngineChat, chunk_metadata, message_of, report

__all__ = ["CacheBlendLLM", "CacheBlendRetriever"]

ROLES = {MessageRole(role): role for role in ("system", "user", "assistant")} | {MessageRole.DEVELOPER: "system"}


class CacheBlendRetriever(BaseRetriever):
    """Finds the engine's chunks nearest a question, as nodes whose text is the chunk's, and nothing else for the model.

    `filter` is one of documents' metadata, see `MetadataFilter.of`.
    """

    def __init__(self, engine: Engine, similarity_top_k: int = 6, filter: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._engine, self._top_k, self._filter = engine, similarity_top_k, filter

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = []
        for scored in self._engine.search(query_bundle.query_str, self._top_k, self._filter):
            chunk, metadata = scored.chunk, chunk_metadata(scored)
            hidden = {key: list(metadata) for key in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")}
            # A title before the text would be another text.
            node = TextNode(id_=f"{chunk.document_id}:{chunk.position}", text=chunk.text, metadata=metadata, **hidden)
            nodes.append(NodeWithScore(node=node, score=scored.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class CacheBlendLLM(CustomLLM):
    """Answers prompts and chats over the stored KV of the chunks that they hold; see `ChatCacheBlend` of LangChain.

    Options of a call are those of `integrations/chat.py`, see `RequestOptions`. A prompt is a chat of one message. The event
    loop goes on during the asynchronous calls.
    """

    engine: Any = Field(exclude=True)  # an Engine
    method: str = "blend"
    recompute_ratio: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    _chat: EngineChat = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._chat = EngineChat(self.engine)

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes by which LlamaIndex packs contexts."""
        window = self.engine.fusor.max_positions or 2**20
        output = min(self.max_tokens or self.engine.config.max_tokens or window // 4, MAX_NEW_TOKENS)
        return LLMMetadata(
            context_window=window, num_output=output, is_chat_model=True, model_name=str(self.engine.config.model)
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._answer(messages, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await asyncio.to_thread(self._answer, messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseGen:
        return self._pieces(messages, **kwargs)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseAsyncGen:
        return _in_threads(self._pieces(messages, **kwargs))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return chat_to_completion_decorator(self._answer)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await asyncio.to_thread(chat_to_completion_decorator(self._answer), prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponseGen:
        return stream_chat_to_completion_decorator(self._pieces)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponseAsyncGen:
        return _in_threads(stream_chat_to_completion_decorator(self._pieces)(prompt, **kwargs))

    def _answer(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        *_, last = self._pieces(messages, **kwargs)
        return last

    def _pieces(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseGen:
        """The text so far and its newest piece, and at last the answer's metadata."""
        fields = {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}
        text = ""
        for piece, done in self._chat.stream([_message(message) for message in messages], {**fields, **kwargs}):
            text += piece
            message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
            yield ChatResponse(message=message, delta=piece, additional_kwargs={} if done is None else report(done))


async def _in_threads(items: Iterator[Any]) -> AsyncGenerator[Any, None]:
    """Items of an iterator whose steps run in a thread, so that the event loop goes on."""
    end = object()
    while (item := await asyncio.to_thread(next, items, end)) is not end:
        yield item


def _message(message: ChatMessage) -> Message:
    texts = [block.text if block.block_type == "text" else None for block in message.blocks]
    return message_of(ROLES.get(message.role), message.role.value, texts)
