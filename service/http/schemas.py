"""Bodies of requests: OpenAI's fields, and those that RAG needs beside them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cacheblend.service.engine.prompt import Message

from .tools import MAX_TOOLS, call_schema, check_bounds, read_arguments

MAX_STOP_STRINGS = 4
MAX_NUM_CHUNKS = 1000
MAX_MESSAGES = 1000
MAX_PARTS = 1000
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_INPUTS = 2048  # texts of one call for embeddings, as OpenAI has it
TEXT_TAG, LIST_TAG, OBJECT_TAG = "<text>", "<list>", "<object>"  # which part of a union a value is read as; no names of fields
MAX_FIELDS = 100  # of one object, known or not: each that is not known is an error of its own


# A constraint has pydantic refuse half a surrogate pair, which JSON can spell and which is no character.
Text = Annotated[str, StringConstraints(min_length=0)]
Salt = Annotated[Text, StringConstraints(max_length=256)]
StopString = Annotated[Text, StringConstraints(min_length=1, max_length=256)]

OneText = Annotated[list[Text], Field(min_length=1, max_length=1, fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
# Says which of two forms a value has, so that an error speaks of that one.
TextOrList = Discriminator(lambda value: LIST_TAG if isinstance(value, list) else TEXT_TAG)
TextOrObject = Discriminator(lambda value: OBJECT_TAG if isinstance(value, dict) else TEXT_TAG)
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[Text, StringConstraints(min_length=1, max_length=256)]


def _limit_biases(given: Any) -> Any:
    """Refuse too many biases before each is looked at: every one that is wrong is an error of its own."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"is too long; at most {MAX_BIASES}")
    return given


Biases = Annotated[dict[str, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_limit_biases)]


class StrictModel(BaseModel):
    """A field that is not known is refused: what has no effect must not look as if it had.

    `ignored` names fields that clients send and that change nothing here: they may hold anything.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"has {len(given)} fields, more than {MAX_FIELDS}")
        return {name: value for name, value in given.items() if name not in cls.ignored}


class DocumentBody(BaseModel):
    """A document; keys other than these are ignored, as chat templates do."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: Text | None = None
    title: Text | None = None
    text: Text


class TextPart(StrictModel):
    """A part of a message; only text is accepted."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "text":
            media = next((word for word in ("image", "audio", "video", "file") if word in kind), "parts of this type")
            raise ValueError(f"{media}: this service reads only text; leave the part out, or send its text")
        return given


Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class CalledFunction(StrictModel):
    """Function that is called; the arguments are JSON in a text."""

    name: FunctionName
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        read_arguments(text)
        return text


class CallBody(StrictModel):
    """A call of an earlier answer, which comes back in the conversation."""

    ignored = frozenset({"index"})  # of a stream's pieces
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction

    def call(self) -> dict[str, Any]:
        """The call as chat templates have it."""
        function = {"name": self.function.name, "arguments": read_arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


Content = Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Parts, Tag(LIST_TAG)], TextOrList]


class MessageBody(StrictModel):
    """One turn of a chat."""

    ignored = frozenset({"annotations", "reasoning_content"})  # of an earlier answer that comes back
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[CallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[CallId | None, Field(validate_default=True)] = None
    content: Annotated[Content | None, Field(validate_default=True)] = None
    name: Annotated[Text, StringConstraints(max_length=256)] | None = None
    # Of an answer of OpenAI's or another service's that comes back in a conversation: what says nothing is ignored.
    refusal: None = None
    audio: None = None
    function_call: None = None

    @field_validator("tool_calls")
    @classmethod
    def _are_the_assistants(cls, calls: list[CallBody] | None, info: ValidationInfo) -> list[CallBody] | None:
        if calls and info.data.get("role") != "assistant":
            raise ValueError("are only the assistant's; leave them out")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _is_of_a_result(cls, call: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("role") == "tool") != (call is not None):
            raise ValueError("say with a tool's result, and with nothing else, which call it is of")
        return call

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: str | list[TextPart] | None, info: ValidationInfo) -> str | list[TextPart] | None:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("is missing; give it")
        return content

    def message(self) -> Message:
        """The turn in the service's words."""
        content = self.content or ""
        return Message(
            "system" if self.role == "developer" else self.role,
            content if isinstance(content, str) else "".join(part.text for part in content),
            tuple(call.call() for call in self.tool_calls or ()),
            self.tool_call_id,
            self.name,
        )


class FunctionBody(StrictModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # where a call must come its arguments always have their schema


class ToolBody(StrictModel):
    """A tool; only functions are accepted."""

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> dict[str, Any]:
        """The tool as chat templates have it."""
        return {"type": "function", "function": self.function.model_dump(exclude={"strict"}, exclude_none=True)}


class NamedFunction(StrictModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(StrictModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


def _differ(tools: list[ToolBody]) -> list[ToolBody]:
    """Refuse two tools of one name, and tools that are too much together."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("two have the same name; give each its own")
    check_bounds([tool.tool() for tool in tools])
    return tools


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(_differ)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT_TAG)] | Annotated[NamedTool, Tag(OBJECT_TAG)], TextOrObject
]


class StreamOptions(StrictModel):
    """Options of a stream's end."""

    ignored = frozenset({"include_obfuscation"})
    include_usage: bool = False


class JsonSchema(StrictModel):
    """A schema that the answer has; it is enforced whether `strict` says so or not."""

    ignored = frozenset({"name", "description", "strict"})
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(StrictModel):
    """Form of the answer: any text, a JSON object, or JSON that has a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('give json_schema with type "json_schema", and with no other')
        return self


# docs/service.md lists them.
OF_CLIENTS = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning_effort verbosity "
    "prediction"
)
# Open WebUI's page adds them to OpenAI's fields, and its server acts on them itself; docs/clients.md lists them.
OF_OPEN_WEBUI = (
    "chat_id session_id id message_id parent_id parent_message user_message features variables background_tasks model_item "
    "filter_ids tool_ids tool_servers skill_ids"
)


class GenerationBody(StrictModel):
    """Fields of chat and text completions.

    Those of OpenAI's that would change the answer and are not supported are accepted only with their neutral value.
    """

    ignored = frozenset(OF_CLIENTS.split())
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
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = 1.0
    logit_bias: Biases | None = None  # by token id
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    # RAG
    documents: Annotated[list[DocumentBody], Field(fail_fast=True)] | None = None  # how many: `max_documents`
    num_chunks: Annotated[int, Field(ge=0, le=MAX_NUM_CHUNKS)] | None = None
    method: str = "blend"
    recompute_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    cache_salt: Salt = ""
    return_chunks: bool = False

    @property
    def called_tools(self) -> list[ToolBody]:
        """The tools that the model may call."""
        return []

    @property
    def forced_call(self) -> dict[str, Any] | None:
        """The JSON schema of the call that the answer must be; None where it may be a text."""
        return None

    @property
    def returned_logprobs(self) -> int | None:
        """How many of the likeliest tokens are returned with each; None for nothing of it."""
        return None

    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    ignored = frozenset(f"{OF_CLIENTS} {OF_OPEN_WEBUI}".split())

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None  # without one "auto"
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    @property
    def called_tools(self) -> list[ToolBody]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_call(self) -> dict[str, Any] | None:
        if self.tool_choice in (None, "none", "auto"):
            return None
        only = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.called_tools]
        return call_schema([(one.name, one.parameters) for one in functions if only in (None, one.name)])

    @property
    def returned_logprobs(self) -> int | None:
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
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: None = None

    @property
    def returned_logprobs(self) -> int | None:
        return self.logprobs

    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def _without_token_ids(inputs: list[Any]) -> list[Any]:
    if inputs and isinstance(inputs[0], int | list):
        raise ValueError("give texts; token ids are other models' (in LangChain: check_embedding_ctx_length=False)")
    return inputs


Inputs = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), BeforeValidator(_without_token_ids)]


class EmbeddingsBody(StrictModel):
    """`POST /v1/embeddings`."""

    ignored = frozenset(OF_CLIENTS.split())

    model: str | None = None
    input: Annotated[Annotated[Text, Tag(TEXT_TAG)] | Annotated[Inputs, Tag(LIST_TAG)], TextOrList]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """`input` as a list."""
        return [self.input] if isinstance(self.input, str) else self.input
