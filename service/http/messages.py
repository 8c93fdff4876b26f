"""`/v1/messages` of Anthropic's API: a chat without tools, whose answer and pieces are in Anthropic's words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator

from cacheblend.service.engine.decoding import Piece
from cacheblend.service.engine.request import Done

from .chat import ANSWERS, Generation, answer_chat, prepare_chat, server_event
from .guard import JsonRoute
from .schemas import OF_CLIENTS, ChatBody, Content, MessageBody, StopStrings, TokenLimit

REASONS = {"stop": "end_turn", "length": "max_tokens"}
FIELDS = {"thinking": "reasoning_content", "text": "content"}  # of OpenAI's messages, by the kind of block
router = APIRouter(route_class=JsonRoute)


class MessagesBody(ChatBody):
    """`POST /v1/messages`; beside Anthropic's fields it has a chat's."""

    ignored = frozenset(f"{OF_CLIENTS} tool_choice".split())  # which says nothing without tools
    max_tokens: TokenLimit
    system: Content | None = None
    stop: Annotated[StopStrings | None, Field(alias="stop_sequences")] = None
    tools: None = None
    n: Literal[1] | None = 1

    @model_validator(mode="after")
    def _read_as_chat(self) -> MessagesBody:
        if self.system:
            self.messages.insert(0, MessageBody(role="system", content=self.system))
        return self


class CountBody(MessagesBody):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: TokenLimit = None


class MessageGeneration(Generation):
    """A chat's answer in Anthropic's words: a block of thoughts, if there are some, and one of text."""

    def shown(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        (choice,) = answer["choices"]
        content = [_block(kind, text) for kind, text in _texts(choice["message"])]
        return self._message(content, _usage(answer["usage"]), **_end(choice), cacheblend=answer["cacheblend"])

    async def pieces(self, index: int, event: Piece | Done) -> AsyncIterator[str]:
        usage = {"input_tokens": len(self._served[0].prompt), "output_tokens": 0}  # what of it was cached is said at the end
        yield _event("message_start", message=self._message([], usage))
        kinds = list[str]()
        async for chunk in self.chunks(index, event, has_usage=True):
            for choice in chunk.get("choices", ()):
                for kind, text in _texts(choice["delta"]):
                    if kind not in kinds:
                        yield _event("content_block_stop", index=len(kinds) - 1) if kinds else ""
                        yield _event("content_block_start", index=len(kinds), content_block=_block(kind, ""))
                        kinds.append(kind)
                    delta = {"type": f"{kind}_delta", kind: text}
                    yield _event("content_block_delta", index=len(kinds) - 1, delta=delta)
        if "error" in chunk:
            yield _event("error", error=chunk["error"])
            return
        yield _event("content_block_stop", index=len(kinds) - 1) if kinds else ""
        yield _event("message_delta", delta=_end(choice), usage=_usage(chunk["usage"]))
        yield _event("message_stop")

    def _message(self, content: list[dict[str, str]], usage: dict[str, int], **end: Any) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage, **end}


@router.post("/v1/messages", responses=ANSWERS)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer as `/v1/chat/completions` does, for clients of Anthropic's API."""
    return await answer_chat(body, request, MessageGeneration)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """Count the tokens of the prompt that `/v1/messages` would answer, chunks included."""
    (prepared,) = await prepare_chat(body, request)
    return {"input_tokens": len(prepared.prompt)}


def _texts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Thoughts and text of a message, or of a piece of one, each with the kind of its block."""
    return [(kind, message[field]) for kind, field in FIELDS.items() if message.get(field)]


def _block(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    stop = choice["stop_reason"]
    return {"stop_reason": REASONS[choice["finish_reason"]] if stop is None else "stop_sequence", "stop_sequence": stop}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Anthropic's counts, whose input does not include what was cached."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return {**tokens, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _event(kind: str, **value: Any) -> str:
    return f"event: {kind}\n{server_event({'type': kind, **value})}"
