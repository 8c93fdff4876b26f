"""`/v1/chat/completions` and `/v1/completions`: retrieve, prefill, stream, and tell how it went."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cacheblend.base.errors import DeadlineError
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import PromptLayout
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.engine.request import chunk_origin

from ..serving import Check, Done, Event, Failed, Piece, ServedRequest
from ..serving.request import TextStream
from .body import JsonRoute
from .errors import ApiError, error_body
from .schemas import ChatBody, CompletionBody, GenerationBody
from .server import LOOK_FOR_CLIENT_S, Server, arrived, run_call

DEFAULT_NUM_CHUNKS = 6
LATE_S = 1.0  # so long after its deadline a request that the scheduler has not told of it is answered all the same
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` as server-sent events.", "content": {"text/event-stream": {}}}
}
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=ANSWERS)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer the last message over the nearest chunks, or over the documents given."""
    engine: Engine = request.state.engine

    def prepare(check: Check) -> PromptRequest:
        messages = [message.message() for message in body.messages]
        num_chunks = _num_chunks(engine, body, DEFAULT_NUM_CHUNKS)
        layout = engine.prompts.chat(messages, with_chunks=num_chunks > 0 or body.documents is not None)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return _prepare(engine, body, layout, messages[-1].content, num_chunks, max_tokens, check)

    return await _respond(body, request, ChatShape(), prepare)


@router.post("/v1/completions", responses=ANSWERS)
async def completion(body: CompletionBody, request: Request) -> Response:
    """Continue a text, after the documents given or, with `num_chunks`, the chunks nearest it."""
    engine: Engine = request.state.engine

    def prepare(check: Check) -> PromptRequest:
        layout = engine.prompts.completion(body.text())
        return _prepare(engine, body, layout, body.text(), body.num_chunks or 0, body.max_tokens, check)

    return await _respond(body, request, TextShape(), prepare)


@dataclass(frozen=True, slots=True)
class ChatShape:
    """How a chat completion looks, whole and in pieces."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        """The choice of a whole answer."""
        return {"message": {"role": "assistant", "content": text}, "logprobs": None}

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """The choice of a piece."""
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}, "logprobs": None}


@dataclass(frozen=True, slots=True)
class TextShape:
    """The same of a text completion."""

    prefix = "cmpl"
    kind = stream_kind = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """The choice of a whole answer."""
        return {"text": text, "logprobs": None}

    def piece(self, text: str, *, first: bool) -> dict[str, Any]:
        """The choice of a piece."""
        return {"text": text, "logprobs": None}


def _num_chunks(engine: Engine, body: GenerationBody, default: int) -> int:
    """What was asked for, or as much of the default as there is."""
    if body.documents is not None:
        if body.num_chunks:
            raise ApiError(400, "num_chunks: leave it out beside documents, which are all used", param="num_chunks")
        return 0
    return min(default, engine.retriever.chunk_count) if body.num_chunks is None else body.num_chunks


def _prepare(
    engine: Engine,
    body: GenerationBody,
    layout: PromptLayout,
    question: str,
    num_chunks: int,
    max_tokens: int | None,
    check: Check,
) -> PromptRequest:
    return engine.prepare(
        question,
        layout=layout,
        top_k=num_chunks,
        method=body.method,
        documents=None if body.documents is None else [document.model_dump() for document in body.documents],
        recompute_ratio=body.recompute_ratio,
        max_tokens=max_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        sampling_top_k=body.top_k or 0,
        cache_salt=body.cache_salt,
        check=check,
    )


async def _respond(
    body: GenerationBody, request: Request, shape: ChatShape | TextShape, prepare: Callable[[Check], PromptRequest]
) -> Response:
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    server.check_model(body.model)
    tenant = request.state.tenant
    server.scheduler.check_room(tenant, server.preparing.count(tenant))
    if body.documents is not None and len(body.documents) > server.http.max_documents:
        message = f"documents: {len(body.documents)} are more than max_documents={server.http.max_documents}; give fewer"
        raise ApiError(400, message, param="documents", code="too_many_documents")
    prepared = await run_call(server.preparing, request, prepare, cache_salt=body.cache_salt)
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def deliver(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    served = ServedRequest(
        engine,
        prepared,
        deliver,
        tenant=tenant,
        cache_salt=body.cache_salt,
        seed=body.seed,
        stop=body.stop_strings(),
        own_ratio=body.recompute_ratio is not None,
        arrived=arrived(request),
    )
    server.scheduler.submit(served)
    head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.model_name}
    if not body.stream:
        return await _whole(body, request, shape, served, events, head)
    try:
        first = await _next(request, served, events)  # an error before the first token is a plain response, not a stream
    except BaseException:
        served.cancel()
        raise
    if isinstance(first, Failed):
        raise first.error
    return EventStream(_stream(body, shape, served, first, events, head), served)


class EventStream(StreamingResponse):
    """Server-sent events of a request, which is cancelled when the response ends, however early.

    Not in the generator: one that the client's going away ends before its first event runs no `finally`.
    """

    def __init__(self, events: AsyncIterator[str], served: ServedRequest) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._served.cancel()


async def _whole(
    body: GenerationBody,
    request: Request,
    shape: ChatShape | TextShape,
    served: ServedRequest,
    events: asyncio.Queue[Event],
    head: dict[str, Any],
) -> Response:
    try:
        event = await _next(request, served, events)
        while isinstance(event, Piece):
            event = await _next(request, served, events)
        if isinstance(event, Failed):
            raise event.error
    finally:
        served.cancel()  # does nothing to one that has ended
    choice = {"index": 0, **shape.whole(event.answer.text), "finish_reason": event.finish_reason}
    return JSONResponse(
        {**head, "object": shape.kind, "choices": [choice], "usage": usage(event), "cacheblend": _report(body, served, event)}
    )


async def _next(request: Request, served: ServedRequest, events: asyncio.Queue[Event]) -> Event:
    """The next event of a request whose client is there, and not too late; both are looked for while nothing comes."""
    deadline_s = request.app.state.server.scheduler.config.deadline_s
    while True:
        try:
            return await asyncio.wait_for(events.get(), LOOK_FOR_CLIENT_S)
        except TimeoutError:
            if await request.is_disconnected():
                raise ApiError(499, "the client went away") from None  # nobody reads it; the log does
            if time.perf_counter() > served.arrived + deadline_s + LATE_S:  # a step takes longer than that
                raise DeadlineError(f"no answer within deadline_s={deadline_s:g}; ask for less, or later") from None


async def _stream(
    body: GenerationBody,
    shape: ChatShape | TextShape,
    served: ServedRequest,
    event: Event,
    events: asyncio.Queue[Event],
    head: dict[str, Any],
) -> AsyncIterator[str]:
    """The events' texts."""
    head = {**head, "object": shape.stream_kind}
    first = True
    while isinstance(event, Piece):
        if event.text or first:
            choice = {"index": 0, **shape.piece(event.text, first=first), "finish_reason": None}
            yield _event({**head, "choices": [choice]})
            first = False
        event = await events.get()
    if isinstance(event, Failed):
        yield _event(error_body(event.error))
        return
    choice = {"index": 0, **shape.piece(event.rest, first=False), "finish_reason": event.finish_reason}
    yield _event({**head, "choices": [choice], "cacheblend": _report(body, served, event)})
    if body.stream_options is not None and body.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(event)})
    yield "data: [DONE]\n\n"


def _report(body: GenerationBody, served: ServedRequest, done: Done) -> dict[str, Any]:
    report = {**plan_report(done), "prepare_s": served.prepared.retrieved - served.arrived}
    if body.return_chunks:
        report["chunks"] = chunk_report(done, served.engine.fusor.tokenizer)
    return report


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def usage(done: Done) -> dict[str, Any]:
    """OpenAI's `usage`. `cached_tokens` are those whose KV was there before, `recomputed_tokens` how many of the reusable ones
    were recomputed, in the mean over layers 1 and up.
    """
    plan = done.answer.plan
    completion_tokens = len(done.answer.token_ids)
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": plan.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": plan.cached_tokens, "recomputed_tokens": round(plan.recomputed_tokens, 3)},
    }


def plan_report(done: Done) -> dict[str, Any]:
    """Method, hits, ratio and times of a request."""
    plan, timings = done.answer.plan, done.answer.timings
    return {
        "method": plan.method,
        "hits": plan.hits,
        "misses": plan.misses,
        "recompute_ratio": plan.recompute_ratio,
        "reusable_tokens": plan.reusable_tokens,
        "recomputed_tokens": plan.recomputed_tokens,
        "loaded_bytes": dict(plan.loaded_bytes),
        "retrieve_s": timings.retrieve_s,
        "queue_s": done.queue_s,
        "ttft_s": timings.ttft_s,
        "total_s": timings.total_s,
    }


def chunk_report(done: Done, tokenizer: Any) -> list[dict[str, Any]]:
    """The chunks of a prompt, in order, with each token's text, KV deviation, and share of the layers that recomputed it."""
    plan, chunks = done.answer.plan, done.answer.chunks
    share_N = torch.zeros(plan.prompt_tokens)
    later = plan.recomputed[1:]
    for positions in later:
        share_N[positions] += 1 / len(later)
    start = plan.prompt_tokens - sum(len(scored.chunk.token_ids) for scored in chunks) - plan.suffix_tokens
    report = []
    for scored in chunks:
        chunk, stop = scored.chunk, start + len(scored.chunk.token_ids)
        source = _source(done, start)
        report.append(
            {
                **chunk_origin(scored),
                "source": source,
                "tokens": [
                    {"text": text, "deviation": round(deviation, 6), "recomputed": round(share, 4)}
                    for text, deviation, share in zip(
                        token_texts(chunk.token_ids, tokenizer),
                        done.deviation_N[start:stop].tolist(),
                        share_N[start:stop].tolist(),
                        strict=True,
                    )
                ],
            }
        )
        start = stop
    return report


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Each token's part of their text, the spaces between them included; a character of several tokens is the last one's."""
    stream = TextStream(tokenizer)
    texts = [stream.add(token) for token in token_ids]
    return [*texts[:-1], texts[-1] + stream.finish()]


def _source(done: Done, position: int) -> str:
    """Tier of the KV at a position: "ram", "nvme", "memory", or "computed" for what no KV was used of."""
    start = 0
    for segment in done.answer.plan.segments:
        start += len(segment.token_ids)
        if position < start:
            return segment.tier or "computed"
    return "computed"
