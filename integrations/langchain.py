"""LangChain's interfaces: a chat model that blends the stored KV of the documents it is given, and the engine's retriever.

A chain blends where the retriever's documents reach the chat model as documents, `model.invoke(question, documents=found)`, as
in `examples/langchain_chain.py`. What a prompt template has put into a message's text is text: it is answered, and not blended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cacheblend.base.extras import needs_extra

with needs_extra("langchain"):
    from langchain_core.callbacks import CallbackManagerForLLMRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import ChatGeneration, ChatResult
    from langchain_core.retrievers import BaseRetriever
    from pydantic import ConfigDict, SkipValidation

from cacheblend.base.errors import InputError
from cacheblend.retriever import Chunk
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message

__all__ = ["CacheBlendRetriever", "ChatCacheBlend"]

CALL_OPTIONS = ("method", "recompute_ratio", "max_tokens", "temperature", "top_p")
ROLES = {"system": "system", "human": "user", "ai": "assistant"}


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


class ChatCacheBlend(BaseChatModel):
    """Answers over documents from their stored KV.

    Documents come as an option of the call: `model.invoke(messages, documents=docs)`, or `model.bind(documents=docs)` in a
    chain. They are LangChain documents, which `CacheBlendRetriever` or any other retriever finds, or mappings with `title` and
    `text`. Without documents it is a plain chat model: nothing of a message's text is blended, whatever a template put there.
    The fields but for `engine` are options of a call too: `model.bind(max_tokens=5)`.

    Args:
        engine: open.
        method: see `Engine.answer`.
        recompute_ratio: see `Engine.answer`.
        max_tokens: see `Engine.answer`.
        temperature: see `Engine.answer`.
        top_p: see `Engine.answer`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    engine: SkipValidation[Engine]
    method: str = "blend"
    recompute_ratio: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"model": self.engine.config.model, "method": self.method, "recompute_ratio": self.recompute_ratio}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document | Mapping[str, object]] | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        if unknown := ", ".join(sorted(kwargs.keys() - set(CALL_OPTIONS))):
            raise InputError(f"{unknown}: not an option of ChatCacheBlend; give documents, stop, {', '.join(CALL_OPTIONS)}")
        turns = [_turn(message) for message in messages]
        answer = self.engine.answer(
            turns[-1].content if turns else "",
            layout=self.engine.prompts.chat(turns, with_chunks=documents is not None),
            top_k=0,
            documents=None if documents is None else [self._chunk_or_text(document) for document in documents],
            **{name: kwargs.get(name, getattr(self, name)) for name in CALL_OPTIONS},
        )
        text = answer.text
        for end in stop or ():
            text = text.partition(end)[0]
        plan = answer.plan
        message = AIMessage(
            content=text,
            usage_metadata=UsageMetadata(
                input_tokens=plan.prompt_tokens,
                output_tokens=len(answer.token_ids),
                total_tokens=plan.prompt_tokens + len(answer.token_ids),
                input_token_details={"cache_read": plan.cached_tokens},
            ),
            response_metadata={"plan": answer.as_dict()["plan"], "timings": answer.as_dict()["timings"]},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk_or_text(self, document: Document | Mapping[str, object]) -> Mapping[str, object] | Chunk:
        """The engine's own chunk where the document is one, else its text, to be split."""
        if not isinstance(document, Document):
            return document
        id_, position = document.metadata.get("document_id"), document.metadata.get("position")
        if isinstance(id_, str) and isinstance(position, int):
            try:
                chunks = self.engine.retriever.chunks(id_)
            except InputError:  # another retriever's document, or one that was deleted since
                chunks = []
            for chunk in chunks:
                if chunk.position == position and chunk.text == document.page_content:
                    return chunk
        return {"text": document.page_content}


def _turn(message: BaseMessage) -> Message:
    if message.type not in ROLES:
        raise InputError(f"a {message.type} message cannot be answered; give {', '.join(ROLES)} messages")
    if not isinstance(message.content, str):
        raise InputError("a message's content must be text")
    return Message(ROLES[message.type], message.content)
