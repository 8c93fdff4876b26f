"""Bodies of requests: OpenAI's fields, and those that RAG needs beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from cacheblend.service.engine.prompt import Message

MOST_STOP_STRINGS = 4
MOST_NUM_CHUNKS = 1000
MOST_MESSAGES = 1000
MOST_PARTS = 1000
MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_INPUTS = 2048  # texts of one call for embeddings, as OpenAI has it
TEXT_TAG, LIST_TAG = "<text>", "<list>"  # which part of a union a value is read as; no names of fields
MOST_FIELDS = 100  # of one object, known or not: each that is not known is an error of its own


def _unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not Unicode: {error.reason} at {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]
Salt = Annotated[Text, StringConstraints(max_length=256)]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=256)]

OneText = Annotated[list[Text], Field(min_length=1, max_length=1, fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Inputs = Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
StopList = Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS, fail_fast=True)]
# Says which of two forms a value has, so that an error speaks of that one.
TextOrList = Discriminator(lambda value: LIST_TAG if isinstance(value, list) else TEXT_TAG)


class StrictModel(BaseModel):
    """A field that is not known is refused: what has no effect must not look as if it had."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"has {len(given)} fields, more than {MOST_FIELDS}")
        return given


class DocumentBody(BaseModel):
    """A document; keys other than these are ignored, as chat templates do."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: Text | None = None
    title: Text | None = None
    text: Text


class TextPart(StrictModel):
    """A part of a message; text alone is taken."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Any = None  # of an earlier answer that comes back; ignored
    logprobs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            media = next((word for word in ("image", "audio", "video", "file") if word in kind), "parts of this type")
            raise ValueError(f"{media}: this service reads text alone; leave the part out, or send its text")
        return given


Parts = Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]


class MessageBody(StrictModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Parts, Tag(LIST_TAG)], TextOrList]
    name: str | None = None
    # Of an answer of OpenAI's or another service's that comes back in a conversation: what says nothing is ignored.
    refusal: None = None
    audio: None = None
    annotations: Any = None
    reasoning_content: Any = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def message(self) -> Message:
        """The turn in the service's words."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message("system" if self.role == "developer" else self.role, text)


class StreamOptions(StrictModel):
    """What a stream ends with."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # ignored


class JsonSchema(StrictModel):
    """A schema that the answer has; it is enforced whether `strict` says so or not."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(StrictModel):
    """What the answer looks like: any text, a JSON object, or JSON that has a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('give json_schema with type "json_schema", and with no other')
        return self


class IgnoredFields(StrictModel):
    """Fields that clients and gateways send and that change no answer here: taken, whatever they hold, and ignored.

    docs/service.md lists them.
    """

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None


class GenerationBody(IgnoredFields):
    """Fields of chat and text completions.

    Those of OpenAI's that would change the answer and are not supported are taken with their neutral value alone.
    """

    model: str | None = None  # the one there is
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # of sampling, as in vLLM; 0 and -1 are all tokens
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Annotated[StopString, Tag(TEXT_TAG)] | Annotated[StopList, Tag(LIST_TAG)], TextOrList] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = 0.0
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = 1.0
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None  # by token id
    response_format: ResponseFormat | None = None
    # RAG
    documents: Annotated[list[DocumentBody], Field(fail_fast=True)] | None = None  # how many: `max_documents`
    num_chunks: Annotated[int, Field(ge=0, le=MOST_NUM_CHUNKS)] | None = None
    method: str = "blend"
    recompute_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    cache_salt: Salt = ""
    return_chunks: bool = False

    @property
    def answer_format(self) -> ResponseFormat | None:
        """What the answer must look like."""
        return self.response_format

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each; None for nothing of it."""
        return None

    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class OpenWebUiFields(StrictModel):
    """What Open WebUI's page sends beside OpenAI's fields, and acts on itself: ignored. docs/clients.md lists it."""

    chat_id: Any = None
    session_id: Any = None
    id: Any = None
    message_id: Any = None
    parent_id: Any = None
    parent_message: Any = None
    user_message: Any = None
    features: Any = None
    variables: Any = None
    background_tasks: Any = None
    model_item: Any = None
    filter_ids: Any = None
    tool_ids: Any = None
    tool_servers: Any = None
    skill_ids: Any = None


class ChatBody(OpenWebUiFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    @property
    def told_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _tells_what_it_may(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true with it")
        return self


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[OneText, Tag(LIST_TAG)], TextOrList]
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = 1
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: None = None

    @property
    def told_logprobs(self) -> int | None:
        """See `GenerationBody`."""
        return self.logprobs

    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


class InputItem(MessageBody):
    """One turn of `POST /v1/responses`; an earlier answer may come back as it was given."""

    type: Literal["message"] | None = None
    id: Any = None
    status: Any = None


class TextFormat(StrictModel):
    """`ResponseFormat` as `POST /v1/responses` has it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError('give schema with type "json_schema", and with no other')
        return self


class TextOptions(StrictModel):
    """`text` of `POST /v1/responses`."""

    format: TextFormat | None = None
    verbosity: Any = None  # ignored


Items = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ResponsesBody(GenerationBody):
    """`POST /v1/responses`: an answer of one text; nothing is kept of it, and no tools are called."""

    input: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Items, Tag(LIST_TAG)], TextOrList]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    reasoning: Any = None  # ignored, as are the next ones
    truncation: Any = None
    max_tool_calls: Any = None
    max_tokens: None = None
    response_format: None = None
    n: Literal[1] | None = 1
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @property
    def answer_format(self) -> ResponseFormat | None:
        """See `GenerationBody`."""
        if self.text is None or self.text.format is None:
            return None
        own = self.text.format
        return ResponseFormat(
            type=own.type, json_schema=None if own.schema_ is None else JsonSchema.model_validate({"schema": own.schema_})
        )

    def messages(self) -> list[Message]:
        """Instructions and input as turns."""
        system = [Message("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, Message("user", self.input)]
        return [*system, *(item.message() for item in self.input)]


class EmbeddingsBody(IgnoredFields):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Inputs, Tag(LIST_TAG)], TextOrList]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """`input` as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


class TokenizeBody(StrictModel):
    """`POST /tokenize`: a text, or a chat as the model's template renders it."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, and one of them alone")
        return self


class DetokenizeBody(StrictModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class IngestBody(StrictModel):
    """`POST /v1/documents`."""

    documents: Annotated[list[DocumentBody], Field(min_length=1, fail_fast=True)]


class ReplaceBody(StrictModel):
    """`PUT /v1/documents/{id}`."""

    title: Text | None = None
    text: Text


class PinBody(StrictModel):
    """`POST /v1/documents/{id}/pin`."""

    pinned: bool = True
