"""LangChain's interfaces: a chat model that blends the stored KV of the chunks in its messages, and the engine's retriever.

An ordinary chain, retriever to prompt template to model, blends: stored chunks and other passages are found in the messages,
whose tokens stay as they are. `model.invoke(question, documents=found)` puts the documents in as the engine does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from operator import itemgetter
from typing import Any

from cacheblend.base.errors import InputError, needs_extra

with needs_extra("langchain"):
    from langchain_core.callbacks import CallbackManagerForLLMRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.language_models.chat_models import generate_from_stream
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema
    from pydantic import BaseModel, ConfigDict, PrivateAttr, SkipValidation

from cacheblend.retriever import Chunk
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message
from cacheblend.service.engine.request import Done

from .chat import OPTIONS, EngineChat, chunk_metadata, message_of, report

__all__ = ["CacheBlendRetriever", "ChatCacheBlend"]

ROLES = {"system": "system", "human": "user", "ai": "assistant", "AIMessageChunk": "assistant"}


class CacheBlendRetriever(BaseRetriever):
    """Finds the engine's chunks nearest a question, as LangChain documents.

    `ChatCacheBlend` over the same store finds `page_content` in its messages, and uses its stored KV.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    engine: SkipValidation[Engine]
    num_chunks: int = 6  # or as many as there are
    filter: dict[str, Any] | None = None  # of documents' metadata, see `MetadataFilter.of`

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        found = self.engine.search(query, self.num_chunks, self.filter)
        about = [{**chunk_metadata(one), "distance": one.distance, "score": one.score} for one in found]
        return [Document(page_content=one.chunk.text, metadata=each) for one, each in zip(found, about, strict=True)]


class ChatCacheBlend(BaseChatModel):
    """Answers chats over the stored KV of the passages in their messages, see `Engine.find_passages`.

    Documents may also come as an option of the call, `model.invoke(messages, documents=docs)`: LangChain documents of any
    retriever, or mappings with `title` and `text`. They stand before the last message.

    The fields but for `engine` are options of a call too, `model.bind(max_tokens=5)`; so are `stop`, `top_k`, `min_p`, `seed`,
    `presence_penalty`, `frequency_penalty`, `repetition_penalty`, `response_format` and `chat_template_kwargs`; see
    `RequestOptions`. Thoughts of a reasoning model are the last piece's `additional_kwargs["reasoning_content"]`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    engine: SkipValidation[Engine]
    method: str = "blend"
    recompute_ratio: float | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    _chat: EngineChat = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._chat = EngineChat(self.engine)

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        options = {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}
        return {"model": self.engine.config.model, **options}

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of a text, which LangChain counts."""
        return self.engine.prompts.text_ids(text)

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Refused: calls of tools are the service's; an error of the kind that LangChain looks for.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("ChatCacheBlend calls no tools; use ChatOpenAI with the base_url of `cacheblend serve`")

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """The model whose answers are held to a schema and parsed: a pydantic class, a TypedDict or a JSON schema.

        Raises:
            InputError: a `method` other than "json_schema", or another option than `strict`, as in `response_format`.
            MissingExtraError: when asked, where `llguidance` is not installed.
        """
        if kwargs.pop("method", "json_schema") != "json_schema" or kwargs.keys() - {"strict"}:
            raise InputError('with_structured_output: the only method is "json_schema", and strict the only option beside it')
        json_schema = convert_to_json_schema(schema)
        parser: BaseOutputParser[Any] = JsonOutputParser()
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            parser = PydanticOutputParser(pydantic_object=schema)
        form = {"name": json_schema.get("title", "answer"), "schema": json_schema, **kwargs}
        model = self.bind(response_format={"type": "json_schema", "json_schema": form})
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Document | Mapping[str, object]] | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = {name: getattr(self, name) for name in OPTIONS if name in type(self).model_fields}
        # LangChain itself puts an option for tracers beside those of `with_structured_output`.
        options |= {name: value for name, value in kwargs.items() if name != "ls_structured_output_format"}
        given = None if documents is None else [self._document(one) for one in documents]
        options |= {"stop": stop, "documents": given}
        with closing(self._chat.stream([_message(message) for message in messages], options)) as pieces:
            for text, done in pieces:
                metadata = {} if done is None else {**_metadata(done), "chunk_position": "last"}
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=text, **metadata))
                if run_manager is not None:
                    run_manager.on_llm_new_token(text, chunk=chunk)
                yield chunk

    def _document(self, given: Document | Mapping[str, object]) -> Mapping[str, object] | Chunk:
        """The engine's own chunk if the document is one; else a text of any other retriever, to be split."""
        if not isinstance(given, Document):
            return given
        title = given.metadata.get("title")
        known = self._chat.known_chunk(given.page_content, given.metadata)
        return known or {"title": title if isinstance(title, str) else "", "text": given.page_content}


def _metadata(done: Done) -> dict[str, Any]:
    metadata = report(done)
    read, written, total, hits = map(metadata.pop, ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens"))
    usage = UsageMetadata(
        input_tokens=read, output_tokens=written, total_tokens=total, input_token_details={"cache_read": hits}
    )
    thoughts = {name: metadata.pop(name) for name in ("reasoning_content",) if name in metadata}
    return {"usage_metadata": usage, "response_metadata": metadata, "additional_kwargs": thoughts}


def _message(message: BaseMessage) -> Message:
    parts = [message.content] if isinstance(message.content, str) else message.content
    texts = [part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None for part in parts]
    return message_of(ROLES.get(message.type), message.type, texts)
