"""Bodies of requests: OpenAI's fields, and those that RAG needs beside them."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, ValidationInfo
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator

from cacheblend.retriever.metadata import MetadataFilter, read_metadata
from cacheblend.service.engine.grammar import answer_schema, call_schema
from cacheblend.service.engine.prompt import Message

from .tool_json import check_bounds, only_allowed, read_earlier_arguments

logger = logging.getLogger(__name__)
MAX_BIASES = 1024
MAX_STOP_CHARACTERS = 4096  # of all stop strings, which each token is searched for
MAX_FIELDS = 100  # of one object, known or not: each that is not known is an error of its own
TAGS = TEXT_TAG, OBJECT_TAG = "<text>", "<object>"  # which part of a union a value is read as; no names of fields
IMAGES = ("image_url", "image", "input_image")  # parts of messages, of OpenAI's, Anthropic's and other forms
Schema = dict[str, Any]  # a JSON schema


def _as_list(given: Any) -> Any:
    """A text, or the token ids of one, as a list of it."""
    if not isinstance(given, str | list):
        raise ValueError("must be a text, or a list of them")
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def _as_parts(given: Any) -> Any:
    """A text as the parts of a message, and a refusal or thoughts among them as parts with a text."""
    return [{"type": "text", "text": given}] if isinstance(given, str) else [_as_part(part) for part in _as_list(given)]


def _as_part(part: Any) -> Any:
    match part:
        case {"type": "refusal", "refusal": str() as text}:
            return {"type": "text", "text": text}
        case {"type": "thinking", "thinking": str() as text}:
            return {"type": "thinking", "text": text}
    return part


def _without_unseen(given: Any) -> Any:
    """Messages without the images before the user's last one, without which earlier answers came about, too."""
    turns, left_out = given if isinstance(given, list) else [], 0
    asks = max((place for place, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), default=0)
    for turn in turns[:asks]:
        if isinstance(turn, dict) and isinstance(parts := turn.get("content"), list):
            turn["content"] = [part for part in parts if not isinstance(part, dict) or part.get("type") not in IMAGES]
            left_out += len(parts) - len(turn["content"])
    if left_out:
        logger.info("%d images before the last question are left out: the model reads only text", left_out)
    return given


def _no_limit(given: Any) -> Any:
    """None for -1, which is no limit of the request's own, as llama.cpp and LM Studio have it."""
    return None if given == -1 else given


def _number_as_text(given: Any) -> Any:
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


def _limit_biases(given: Any) -> Any:
    """Refuse too many biases before each is looked at: every one that is wrong is an error of its own."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise ValueError(f"is too long; at most {MAX_BIASES}")
    return given


def _limit_stops(given: list[str]) -> list[str]:
    if (characters := sum(map(len, given))) > MAX_STOP_CHARACTERS:
        raise ValueError(f"has {characters} characters in all, more than {MAX_STOP_CHARACTERS}; leave some out")
    return list(filter(None, given))


def _without_token_ids(given: Any) -> Any:
    if isinstance(given, list) and given and isinstance(given[0], list):
        raise ValueError("give texts; token ids are other models' (in LangChain: check_embedding_ctx_length=False)")
    return given


# A constraint has pydantic refuse half a surrogate pair, which JSON can spell and which is no character.
Text = Annotated[str, StringConstraints(min_length=0)]
Name = Annotated[Text, StringConstraints(max_length=256)]
CallId = Annotated[Name, StringConstraints(min_length=1)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]  # OpenAI has 64, Anthropic 128
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_limit_biases)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenCount = Annotated[int, Field(ge=1)]
TokenLimit = Annotated[TokenCount | None, BeforeValidator(_no_limit, json_schema_input_type=TokenCount | Literal[-1] | None)]
# Fields that are a text or a list are a list to us.
ListOfTexts = BeforeValidator(_as_list, json_schema_input_type=Text | list[Text])
StopStrings = Annotated[list[Name], Field(fail_fast=True), AfterValidator(_limit_stops), ListOfTexts]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag(TEXT_TAG)] | Annotated[TokenIds, Tag(OBJECT_TAG)],
    Discriminator(lambda value: OBJECT_TAG if isinstance(value, list) else TEXT_TAG),
]
Prompts = Annotated[
    list[Prompt],
    Field(min_length=1, max_length=2048, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=Text | TokenIds | list[Text | TokenIds]),
]
InputTexts = Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]  # as many as OpenAI takes
Inputs = Annotated[InputTexts, BeforeValidator(_without_token_ids), ListOfTexts]


def _say_null(schema: dict[str, Any]) -> None:
    """Describe fields that may be left out as fields that may be null."""
    for name in schema["properties"].keys() - schema.get("required", ()):
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}


class StrictModel(BaseModel):
    """Null is as if the field were left out, and so are `neutral` values. A field that is not known is refused, for it has no
    effect; `ignored` ones, which clients send, may hold anything, and with `ignores_unknown` those that are not known too: the
    log has one line for each. A number without a fraction is a whole one, as 4.0.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_say_null)
    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Any]] = {}
    ignores_unknown: ClassVar[bool] = False
    noted: ClassVar[set[str]] = set()  # of all models, and at most `MAX_FIELDS`: names come from clients

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            raise ValueError(f"has {len(given)} fields, more than {MAX_FIELDS}")
        kept = dict[str, Any]()
        for name, value in given.items():
            if name in cls.ignored or (cls.ignores_unknown and name not in cls.model_fields):
                field = f"{cls.__name__.removesuffix('Body')}.{name[:40]}"
                if field not in cls.noted and len(cls.noted) < MAX_FIELDS:
                    cls.noted.add(field)
                    logger.info("ignored from now on, as it changes nothing here: the field %s", ascii(field))
            elif value is not None and value != cls.neutral.get(name):
                kept[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        return kept


class LenientModel(StrictModel):
    """Fields that are not known change nothing."""

    ignores_unknown = True


class DocumentBody(LenientModel):
    """A document of a chat; other keys, which chat templates ignore, change nothing."""

    id: Annotated[Text | None, BeforeValidator(_number_as_text)] = None
    title: Text | None = None
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _of_libraries(cls, given: Any) -> Any:
        """Read a text without fields, or under LangChain's or Haystack's name; uploads have one form."""
        if not cls.ignores_unknown:
            return given
        if isinstance(given, str):
            return {"text": given}
        for name in ("page_content", "content"):
            if isinstance(given, dict) and "text" not in given and name in given:
                return {"text" if key == name else key: value for key, value in given.items()}
        return given


class IngestedBody(DocumentBody):
    """A document of an upload, with metadata by which searches filter."""

    ignores_unknown = False
    metadata: Annotated[dict[str, Any], AfterValidator(read_metadata)] | None = None


class TextPart(LenientModel):
    """A part of a message; only text is accepted, and thoughts of an earlier answer."""

    type: Literal["text", "thinking"]
    text: Text


Parts = Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)]
Content = Annotated[Parts, BeforeValidator(_as_parts, json_schema_input_type=Text | list[TextPart])]


class CalledFunction(LenientModel):
    """Function that is called; the arguments are JSON in a text."""

    name: FunctionName
    arguments: Annotated[dict[str, Any] | Text, BeforeValidator(read_earlier_arguments, json_schema_input_type=str)] = {}


class CallBody(LenientModel):
    """A call of an earlier answer, which comes back in the conversation; dumped, it is as chat templates have it."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(LenientModel):
    """One turn of a chat; clients send back what other services and libraries have added to an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[CallBody], Field(max_length=32, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None
    content: Content | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # as vLLM names the same
    refusal: Text | None = None
    prefix: bool = False  # of the last turn: continue it, as Mistral and DeepSeek have it
    # What a model would have to see or do is refused.
    audio: None = None
    function_call: None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: are only the assistant's; leave them out")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id: say with a tool's result, and with nothing else, which call it is of")
        if self.content is None and self.role == "user":
            raise ValueError("content: is missing; give it")
        return self

    def message(self) -> Message:
        """The turn in the service's words."""
        parts = self.content or ()
        said, thoughts = ("".join(part.text for part in parts if part.type == kind) for kind in ("text", "thinking"))
        return Message(
            "system" if self.role == "developer" else self.role,
            said or self.refusal or "",
            tuple(call.model_dump() for call in self.tool_calls or ()),
            self.tool_call_id,
            self.name,
            (self.reasoning_content or self.reasoning or thoughts) if self.role == "assistant" else "",
        )


class FunctionBody(LenientModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: Schema | None = None
    strict: Annotated[bool | None, Field(exclude=True)] = None  # templates write what is dumped


class ToolBody(LenientModel):
    """A tool; only functions are accepted. Dumped without None it is as chat templates have it."""

    type: Literal["function"]
    function: FunctionBody


def _differ(tools: list[ToolBody]) -> list[ToolBody]:
    """Refuse two tools of one name, and one that is too long or too deep."""
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ValueError("two have the same name; give each its own")
    for tool in tools:
        check_bounds(tool.model_dump(exclude_none=True))
    return tools


# The discriminator says which of two forms a value has, so that an error speaks of that one.
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT_TAG)] | Annotated[ToolBody, Tag(OBJECT_TAG)],
    Discriminator(lambda value: OBJECT_TAG if isinstance(value, dict) else TEXT_TAG),
]


class StreamOptions(LenientModel):
    """Options of a stream's end."""

    include_usage: bool = False


def _readable(given: dict[str, Any]) -> dict[str, Any]:
    MetadataFilter.of(given)
    return given


class JsonSchema(StrictModel):
    """A schema that the answer has; of one that is not strict, keywords that cannot be enforced are left out."""

    ignored = frozenset({"name", "description"})
    strict: bool = False
    schema_: Annotated[Schema, Field(alias="schema"), AfterValidator(check_bounds)]


class ResponseFormat(StrictModel):
    """Form of the answer: any text, a JSON object, or JSON that has a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('give json_schema with type "json_schema", and with no other')
        return self


# Of OpenAI's, Anthropic's and other services' requests: who asks, and what is stored, cached, routed or preferred.
OF_CLIENTS = (
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention verbosity "
    "prediction cache_control context_management drop_params request_id priority provider ttl keep_alive cache_prompt "
    "inference_geo speed user_profile_id workspace_id diagnostics moderation"
)
# Open WebUI's page adds them to OpenAI's fields, and its server acts on them itself; docs/clients.md lists them.
OF_OPEN_WEBUI = (
    "chat_id session_id id message_id parent_id parent_message user_message features variables background_tasks model_item "
    "filter_ids tool_ids tool_servers skill_ids"
)
# OpenAI's, vLLM's and llama.cpp's that are not supported, by the value that asks for nothing.
NEUTRAL: dict[str, Any] = {
    name: value
    for value, names in (
        ([], "functions tools mcp_servers stop_token_ids transforms"),
        ({}, "web_search_options options extra_body"),
        (["text"], "modalities"),
        ("", "suffix"),
        (False, "echo use_beam_search include_stop_str_in_output"),
        (True, "skip_special_tokens spaces_between_special_tokens add_generation_prompt include_reasoning"),
        (1, "best_of repeat_penalty length_penalty typical_p"),
        (0, "mirostat top_logprobs"),
    )
    for name in names.split()
}


class GenerationBody(StrictModel):
    """Fields of chat and text completions."""

    ignored = frozenset(OF_CLIENTS.split())
    neutral = NEUTRAL
    model: str | None = None  # the one there is
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 0.0
    top_p: Share | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # of sampling, as in vLLM; 0 and -1 are all tokens
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings | None = None
    min_p: Share | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=16)] | None = 1
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Biases | None = None  # by token id
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None
    # RAG
    documents: Annotated[list[DocumentBody], Field(fail_fast=True)] | None = None  # how many: `max_documents`
    num_chunks: Annotated[int, Field(ge=0, le=1000)] | None = None
    filter: Annotated[dict[str, Any], AfterValidator(_readable)] | None = None  # of documents' metadata
    method: str = "blend"
    recompute_ratio: Share | None = None
    max_loss_nats: Annotated[float, Field(gt=0, le=100)] | None = None
    cache_salt: Name = ""
    return_chunks: bool = False

    @property
    def brought(self) -> list[dict[str, Any]] | None:
        """The documents that have a text; None where nothing was found for the request, as where none are named."""
        return [document.model_dump() for document in self.documents or [] if document.text.strip()] or None

    @property
    def answer_schemas(self) -> tuple[str, list[Schema]] | None:
        """The field that asks for JSON, and the schemas of which it has one; None for an answer in any words."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.json_schema is None:
            return "response_format", [{"type": "object"}]
        return "response_format", [answer_schema(form.json_schema.schema_, is_strict=form.json_schema.strict)]


def _beside(name: str) -> AfterValidator:
    """Refuse a value that says nothing where another field is not true."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if not info.data.get(name):
            raise ValueError(f"set {name} to true with it")
        return value

    return AfterValidator(check)


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    ignored = frozenset(f"{OF_CLIENTS} {OF_OPEN_WEBUI}".split())
    messages: Annotated[
        list[MessageBody], Field(min_length=1, max_length=1000, fail_fast=True), BeforeValidator(_without_unseen)
    ]
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), _beside("logprobs")] | None = None
    continue_final_message: bool = False  # of the assistant, in place of a message of its own
    add_generation_prompt: Annotated[Literal[False], _beside("continue_final_message")] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True), AfterValidator(_differ)] | None = None
    tool_choice: ToolChoice | None = None  # without one "auto"
    function_call: Literal["none", "auto"] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32), AfterValidator(check_bounds)] | None = None
    enable_thinking: bool | None = None  # one of those, as some services have it
    reasoning_effort: Name | None = None  # has an effect where the template knows it
    thinking: dict[str, Any] | None = None  # of type "disabled" it is an effort of "none", of "enabled" and "adaptive" it is on

    _only_allowed = model_validator(mode="before")(only_allowed)

    @property
    def called_tools(self) -> list[ToolBody]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def answer_schemas(self) -> tuple[str, list[Schema]] | None:
        only = self.tool_choice.function.name if isinstance(self.tool_choice, ToolBody) else None
        functions = [tool.function for tool in self.called_tools if only in (None, tool.function.name)]
        calls = [call_schema(one.name, one.parameters, is_strict=bool(one.strict)) for one in functions]
        if self.tool_choice not in (None, "none", "auto"):
            return "tool_choice", calls
        held = super().answer_schemas
        return None if held is None else (held[0], [*calls, *held[1]])

    @property
    def returned_logprobs(self) -> int | None:
        """How many of the likeliest tokens are returned with each; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None


def _without_logprobs(echo: bool, info: ValidationInfo) -> bool:
    if echo and info.data.get("logprobs") is not None:
        raise ValueError("log-probabilities of the prompt's tokens are not computed; leave logprobs out, or echo")
    return echo


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    ignored = frozenset(f"{OF_CLIENTS} reasoning_effort".split())
    prompt: Prompts
    max_tokens: Annotated[
        Annotated[int, Field(ge=0)] | None,
        BeforeValidator(_no_limit, json_schema_input_type=Annotated[int, Field(ge=-1)] | None),
    ] = 16  # OpenAI's, and vLLM's
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Annotated[bool, AfterValidator(_without_logprobs)] = False

    @property
    def returned_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingsBody(LenientModel):
    """`POST /v1/embeddings`; fields for services that cut or choose models change nothing here."""

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    # What would change the vectors is refused.
    normalize: Literal[True] | None = None
    instruction: None = None
    prompt_name: None = None
