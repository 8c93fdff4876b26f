"""`/v1/messages` of Anthropic's API: a chat whose body, answer and pieces are in Anthropic's words."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator
from pydantic_core import from_json

from cacheblend.base.errors import PromptTooLongError
from cacheblend.service.engine.decoding import Piece
from cacheblend.service.engine.request import Done

from .chat import ANSWERS, Generation, answer_chat, prepare_chat, server_event
from .guard import JsonRoute
from .schemas import ChatBody, Content, MessageBody, StopStrings, TokenLimit

CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools; others name one
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Of OpenAI's messages, by the kind of block, and what else that has.
FIELDS = {"thinking": ("reasoning_content", {"signature": ""}), "text": ("content", {})}
router = APIRouter(route_class=JsonRoute)


class MessagesBody(ChatBody):
    """`POST /v1/messages`; beside Anthropic's fields it has a chat's. Its documents are those of all its messages."""

    max_tokens: TokenLimit
    system: Content | None = None
    stop: Annotated[StopStrings | None, Field(alias="stop_sequences")] = None
    n: Literal[1] | None = 1

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, given: Any) -> Any:
        """Write what has Anthropic's form as a chat has it; all else stays as it is."""
        if not isinstance(given, dict):
            return given
        body, documents = {**given}, [*own] if isinstance(own := given.get("documents"), list) else []
        if isinstance(messages := given.get("messages"), list):
            body["messages"] = [turn for message in messages for turn in _turns(message, documents)]
        body["documents"] = documents or own
        if isinstance(tools := given.get("tools"), list):
            body["tools"] = list(map(_tool, tools))
        if isinstance(choice := given.get("tool_choice"), dict):
            body["tool_choice"] = CHOICES.get(str(choice.get("type")), {"type": "function", "function": choice})
            body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        if isinstance(config := given.get("output_config"), dict):
            del body["output_config"]
            body["reasoning_effort"] = config.get("effort")
            if isinstance(form := config.get("format"), dict):
                schema = {"schema": form.get("schema"), "strict": True}
                body["response_format"] = {"type": form.get("type"), "json_schema": schema}
        return body

    @model_validator(mode="after")
    def _with_system(self) -> Self:
        self.continue_final_message = self.messages[-1].role == "assistant"
        if self.system:
            self.messages.insert(0, MessageBody(role="system", content=self.system))
        return self


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: TokenLimit = None


class MessageGeneration(Generation):
    """A chat's answer in Anthropic's words: blocks of thoughts, if there are some, of text, and of calls."""

    def shown(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        content = [{**block, **filled} for _, block, _, filled in _blocks(choice["message"])]
        return self._message(content, _usage(answer["usage"]), **_end(choice), cacheblend=answer["cacheblend"])

    async def pieces(self, index: int, event: Piece | Done) -> AsyncIterator[str]:
        usage = {"input_tokens": len(self._served[0].prompt), "output_tokens": 0}  # what of it was cached is said at the end
        yield _event("message_start", message=self._message([], usage))
        blocks, report = list[str](), None
        async for chunk in self.chunks(index, event, has_usage=True):
            report = chunk.get("cacheblend", report)
            for choice in chunk.get("choices", ()):
                for name, block, delta, _ in _blocks(choice["delta"]):
                    if not blocks or name != blocks[-1]:
                        yield _event("content_block_stop", index=len(blocks) - 1) if blocks else ""
                        yield _event("content_block_start", index=len(blocks), content_block=block)
                        blocks.append(name)
                    yield _event("content_block_delta", index=len(blocks) - 1, delta=delta)
        if "error" in chunk:
            yield _event("error", error=chunk["error"])
            return
        yield _event("content_block_stop", index=len(blocks) - 1) if blocks else ""
        yield _event("message_delta", delta=_end(choice), usage=_usage(chunk["usage"]), cacheblend=report)
        yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int], **end: Any) -> dict[str, Any]:
        id_, model = self._head["id"].replace("chatcmpl-", "msg_"), self._head["model"]
        head = {"id": id_, "type": "message", "role": "assistant", "model": model}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage, **end}


@router.post("/v1/messages", responses=ANSWERS)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer as `/v1/chat/completions` does, for clients of Anthropic's API."""
    return await answer_chat(body, request, MessageGeneration)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """Count the tokens of the prompt that `/v1/messages` would answer, chunks included."""
    try:
        (prepared,) = await prepare_chat(body.model_copy(update={"method": "full_recompute"}), request)  # notes no passage
    except PromptTooLongError as error:
        if error.tokens is None:
            raise
        return {"input_tokens": error.tokens}
    return {"input_tokens": len(prepared.prompt)}


def _turns(message: Any, documents: list[Any]) -> list[Any]:
    """The turns of a message: each result of a tool, then what else is said; its documents go to `documents`."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    results, calls, said = list[Any](), list[Any](), list[Any]()
    for block in content:
        match block:
            case {"type": "tool_use"}:
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "function": function})
            case {"type": "tool_result"}:
                found = block.get("content", "")
                found = list(map(_as_text, found)) if isinstance(found, list) else found
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": found})
            case _ if document := _document(block):
                documents.append(document)
            case _:
                said.append(block)
    turn = {**message, "content": said, "tool_calls": calls}
    return [*results, turn] if said or calls or not results else results


def _document(block: Any) -> dict[str, Any] | None:
    """The document of a block; None if it has none with a text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": text} | {"type": "content", "content": text}}:
            return {"title": block.get("title"), "text": _joined(text)}
        case {"type": "search_result", "content": text}:
            return {"title": block.get("title"), "text": _joined(text)}
    return None


def _as_text(part: Any) -> Any:
    """A part of a tool's result: a document as a text, in a tag by which it is found as a passage."""
    match _document(part):
        case {"title": str() | None as title, "text": str() as text}:
            return {"type": "text", "text": "\n".join(filter(None, ("<document>", title, text, "</document>\n")))}
    return part


def _joined(parts: Any) -> Any:
    """The text of text blocks; what else there is stays, and is refused where a document has its text."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts] if isinstance(parts, list) else [parts]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else parts


def _tool(tool: Any) -> Any:
    match tool:
        case {"input_schema": schema, **others}:
            return {"type": "function", "function": {**others, "parameters": schema}}
    return tool


def _blocks(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """The blocks of a message, or of a piece of one: each one's name, itself while it is empty, its delta, and its content."""
    for kind, (field, others) in FIELDS.items():
        if text := message.get(field):
            yield kind, {"type": kind, kind: "", **others}, {"type": f"{kind}_delta", kind: text}, {kind: text}
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        block = {"type": "tool_use", "id": call["id"], "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": arguments}
        yield call["id"], block, delta, {"input": from_json(arguments or "{}", allow_partial=True)}


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice["stop_reason"] if choice["finish_reason"] == "stop" else None  # calls are to be run, whatever ended them
    return {"stop_reason": REASONS[choice["finish_reason"]] if stop is None else "stop_sequence", "stop_sequence": stop}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Anthropic's counts, whose input does not include what was cached."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return {**tokens, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _event(kind: str, **value: Any) -> str:
    return f"event: {kind}\n{server_event({'type': kind, **value})}"
