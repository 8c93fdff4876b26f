"""`/v1/responses`: one text for an input, whole or as the events that OpenAI's clients put together again."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from cacheblend.service.serving.served_request import Done, Failed, Piece

from .body import JsonRoute
from .completions import ANSWERS, answer_report, prepare_chat
from .errors import error_body
from .generation import EventStream, Generation, server_event
from .schemas import ResponsesBody
from .server import Server

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=ANSWERS)
async def respond(body: ResponsesBody, request: Request) -> Response:
    """Answer the input over the nearest chunks, or over the documents given; nothing is kept of it."""
    server: Server = request.app.state.server
    prepare = prepare_chat(request.state.engine, body, body.messages(), body.max_output_tokens)
    generation = await Generation.begin(body, request, prepare)
    draft = _draft(body, server.model_name)
    if body.stream:
        return EventStream(_stream(body, generation, *await generation.first(), draft), generation)
    (done,) = await generation.whole()
    return JSONResponse(_finished(body, generation, done, draft))


def _draft(body: ResponsesBody, model: str) -> dict[str, Any]:
    """The response before there is anything of its text."""
    given = None if body.text is None or body.text.format is None else body.text.format
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature or 0.0,
        "text": {"format": {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(response: dict[str, Any], status: str, *texts: str) -> dict[str, Any]:
    """The one message of a response."""
    id_ = str(response["id"]).replace("resp_", "msg_")
    return {"id": id_, "type": "message", "role": "assistant", "status": status, "content": [_part(text) for text in texts]}


def _finished(body: ResponsesBody, generation: Generation, done: Done, draft: dict[str, Any]) -> dict[str, Any]:
    """The whole response."""
    status = "incomplete" if done.finish_reason == "length" else "completed"
    plan, output_tokens = done.answer.plan, len(done.answer.token_ids)
    return {
        **draft,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": [_item(draft, status, done.answer.text)],
        "usage": {
            "input_tokens": plan.prompt_tokens,
            "input_tokens_details": {"cached_tokens": plan.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": plan.prompt_tokens + output_tokens,
        },
        "cacheblend": answer_report(body, generation.served[0], done),
    }


async def _stream(
    body: ResponsesBody, generation: Generation, index: int, event: Piece | Done, draft: dict[str, Any]
) -> AsyncIterator[str]:
    """The events' texts, in the order of OpenAI's."""
    number = -1

    def sent(kind: str, **values: Any) -> str:
        nonlocal number
        number += 1
        return server_event({"type": f"response.{kind}", "sequence_number": number, **values}, f"response.{kind}")

    # 1. The response, its message and the message's text begin.
    begun = _item(draft, "in_progress")
    place = {"item_id": begun["id"], "output_index": 0, "content_index": 0}
    yield sent("created", response=draft)
    yield sent("in_progress", response=draft)
    yield sent("output_item.added", output_index=0, item=begun)
    yield sent("content_part.added", **place, part=_part(""))
    # 2. The text, as it comes.
    async for _, following in generation.rest(index, event):
        if isinstance(following, Failed):
            why = error_body(following.error)["error"]
            error = {"code": why["code"] or "server_error", "message": why["message"]}
            yield sent("failed", response={**draft, "status": "failed", "error": error})
            return
        text = following.rest if isinstance(following, Done) else following.text
        if text:
            yield sent("output_text.delta", **place, delta=text, logprobs=[])
        if isinstance(following, Done):
            # 3. Text, message and response end, each sent complete.
            whole = _finished(body, generation, following, draft)
            yield sent("output_text.done", **place, text=following.answer.text, logprobs=[])
            yield sent("content_part.done", **place, part=_part(following.answer.text))
            yield sent("output_item.done", output_index=0, item=whole["output"][0])
            yield sent(str(whole["status"]), response=whole)
