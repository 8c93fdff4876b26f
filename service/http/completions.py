"""`/v1/chat/completions` and `/v1/completions`: whole or streamed, and how the answer came about."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from cacheblend.base.progress import Check
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import Message, PromptRenderer, question_place
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.engine.request import chunk_origin
from cacheblend.service.serving.sampling import TokenLogprob
from cacheblend.service.serving.served_request import Done, Failed, Piece, ServedRequest
from cacheblend.service.serving.text_stream import TextStream

from .body import JsonRoute
from .errors import ApiError, error_body
from .generation import EventStream, Generation, Prepare, prepare_prompt, server_event
from .schemas import ChatBody, CompletionBody, GenerationBody, NamedTool
from .server import Server
from .tools import CallReader

DEFAULT_NUM_CHUNKS = 6
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` as server-sent events.", "content": {"text/event-stream": {}}}
}
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=ANSWERS)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer the last message over the nearest chunks, or over the documents given."""
    engine: Engine = request.state.engine
    _check_tools(body, engine.prompts)
    messages = [message.message() for message in body.messages]
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = [tool.tool() for tool in body.called_tools]
    shape = ChatShape([tool.function.name for tool in body.called_tools], 1 if body.parallel_tool_calls is False else None)
    return await _respond(body, request, shape, prepare_chat(engine, body, messages, max_tokens, tools))


def _check_tools(body: ChatBody, prompts: PromptRenderer) -> None:
    """Refuse tools that cannot be called.

    Raises:
        ApiError: the model takes none, or fields are against each other.
    """
    names = [tool.function.name for tool in body.called_tools]
    if names and not prompts.takes_tools:
        message = (
            "tools: the model's chat template takes none; leave them out, ask for JSON with response_format, "
            "or use a model that calls tools"
        )
        raise ApiError(400, message, param="tools", code="unsupported_value")
    if body.tool_choice not in (None, "none", "auto") and not names:
        raise ApiError(400, "tool_choice: there are no tools to call; give tools, or leave it out", param="tool_choice")
    if isinstance(body.tool_choice, NamedTool) and body.tool_choice.function.name not in names:
        message = f"tool_choice: {body.tool_choice.function.name!r} is none of the tools; name one of them"
        raise ApiError(400, message, param="tool_choice", code="invalid_value")
    if names and body.response_format is not None and body.response_format.type != "text":
        message = 'response_format: an answer held to JSON calls no tools; leave it out, or set tool_choice to "none"'
        raise ApiError(400, message, param="response_format", code="invalid_value")


@router.post("/v1/completions", responses=ANSWERS)
async def completion(body: CompletionBody, request: Request) -> Response:
    """Continue a text, after the documents given or, with `num_chunks`, the chunks nearest it."""
    engine: Engine = request.state.engine

    def prepare(check: Check) -> PromptRequest:
        layout = engine.prompts.completion(body.text())
        return prepare_prompt(engine, body, layout, body.text(), body.num_chunks or 0, body.max_tokens, check)

    return await _respond(body, request, TextShape(), prepare)


class Shape(Protocol):
    """Form of a completion, whole and in pieces."""

    prefix: str
    kind: str
    stream_kind: str

    def calls(self) -> CallReader:
        """Finds the calls of tools in one answer."""

    def whole(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The choice of a whole answer."""

    def piece(self, text: str, calls: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
        """The choice of a piece."""

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Any, offset: int) -> dict[str, Any]:
        """Log-probabilities of tokens that begin `offset` characters after the answer's start."""


class ChatShape:
    """A chat completion.

    Args:
        tools: names of those that may be called.
        most_calls: of one answer.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"

    def __init__(self, tools: Collection[str] = (), most_calls: int | None = None) -> None:
        self._tools, self._most_calls = tools, most_calls

    def calls(self) -> CallReader:
        """See `Shape`."""
        return CallReader(self._tools, self._most_calls)

    def whole(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See `Shape`."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": list(calls)}
        return {"message": message}

    def piece(self, text: str, calls: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
        """See `Shape`."""
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": delta}

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Any, offset: int) -> dict[str, Any]:
        """See `Shape`."""

        def reported(token_id: int, logprob: float) -> dict[str, Any]:
            text = tokenizer.decode([token_id])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            {**reported(each.token_id, each.logprob), "top_logprobs": [reported(*likely) for likely in each.likeliest]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


class TextShape:
    """A text completion."""

    prefix = "cmpl"
    kind = stream_kind = "text_completion"

    def calls(self) -> CallReader:
        """See `Shape`."""
        return CallReader(())

    def whole(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """See `Shape`."""
        return {"text": text}

    def piece(self, text: str, calls: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
        """See `Shape`."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Any, offset: int) -> dict[str, Any]:
        """See `Shape`."""
        texts = [tokenizer.decode([each.token_id]) for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                {tokenizer.decode([token]): logprob for token, logprob in ((each.token_id, each.logprob), *each.likeliest)}
                for each in tokens
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
        }


def prepare_chat(
    engine: Engine,
    body: GenerationBody,
    messages: Sequence[Message],
    max_tokens: int | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prepare:
    """How a chat is laid out, over the chunks or documents that its body asks for."""

    def prepare(check: Check) -> PromptRequest:
        num_chunks = _num_chunks(engine, body, DEFAULT_NUM_CHUNKS)
        layout = engine.prompts.chat(messages, with_chunks=num_chunks > 0 or body.documents is not None, tools=tools)
        question = messages[question_place(messages)].content
        return prepare_prompt(engine, body, layout, question, num_chunks, max_tokens, check)

    return prepare


def _num_chunks(engine: Engine, body: GenerationBody, default: int) -> int:
    """What was asked for, or as much of the default as there is."""
    if body.documents is not None:
        if body.num_chunks:
            raise ApiError(400, "num_chunks: leave it out beside documents, which are all used", param="num_chunks")
        return 0
    return min(default, engine.retriever.chunk_count) if body.num_chunks is None else body.num_chunks


async def _respond(body: GenerationBody, request: Request, shape: Shape, prepare: Prepare) -> Response:
    server: Server = request.app.state.server
    generation = await Generation.begin(body, request, prepare)
    head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.model_name}
    if body.stream:
        return EventStream(_stream(body, shape, generation, *await generation.first(), head), generation)
    done = await generation.all_done()
    return await run_in_threadpool(_whole, body, shape, generation.served[0], done, head)


def _whole(
    body: GenerationBody, shape: Shape, served: ServedRequest, done: Sequence[Done], head: dict[str, Any]
) -> JSONResponse:
    """The response of a whole answer; log-probabilities of many tokens are seconds of work."""
    choices = []
    for index, one in enumerate(done):
        text, calls = shape.calls().finish(one.answer.text)
        logprobs = None
        if body.returned_logprobs is not None:
            logprobs = shape.logprobs(one.logprobs, served.engine.fusor.tokenizer, 0)
        reason = "tool_calls" if calls else one.finish_reason
        choices.append({"index": index, **shape.whole(text, calls), "logprobs": logprobs, "finish_reason": reason})
    report = answer_report(body, served, done[0])
    return JSONResponse({**head, "object": shape.kind, "choices": choices, "usage": usage(done), "cacheblend": report})


async def _stream(
    body: GenerationBody, shape: Shape, generation: Generation, index: int, event: Piece | Done, head: dict[str, Any]
) -> AsyncIterator[str]:
    """The events' texts."""
    head = {**head, "object": shape.stream_kind}
    tokenizer = generation.served[0].engine.fusor.tokenizer
    pending: list[list[TokenLogprob]] = [[] for _ in generation.served]  # of tokens whose text is held back
    offsets: list[int | None] = [None for _ in generation.served]  # characters so far; None before the first piece
    readers = [shape.calls() for _ in generation.served]
    done: dict[int, Done] = {}
    async for place, following in generation.events(index, event):
        if isinstance(following, Failed):
            yield server_event(error_body(following.error))
            return
        offset = offsets[place]
        if isinstance(following, Done):
            text, calls = readers[place].finish(following.rest)
            reason = "tool_calls" if calls else following.finish_reason
            done[place] = following
        else:
            text, calls, reason = readers[place].add(following.text), [], None
            pending[place] += [following.logprob] if following.logprob is not None else []
            if not text and offset is not None:
                continue
        offsets[place] = (offset or 0) + len(text)
        choice = {"index": place, **shape.piece(text, calls, first=offset is None), "logprobs": None, "finish_reason": reason}
        if body.returned_logprobs is not None:
            choice["logprobs"] = shape.logprobs(pending[place], tokenizer, offset or 0)
            pending[place] = []
        piece = {**head, "choices": [choice]}
        if len(done) == len(generation.served):
            piece["cacheblend"] = answer_report(body, generation.served[0], done[0])
        yield server_event(piece)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield server_event({**head, "choices": [], "usage": usage([done[place] for place in sorted(done)])})
    yield "data: [DONE]\n\n"


def answer_report(body: GenerationBody, served: ServedRequest, done: Done) -> dict[str, Any]:
    """What `cacheblend` in a response has."""
    report = {**plan_report(done), "prepare_s": served.prepared.retrieved - served.arrived}
    if body.return_chunks:
        report["chunks"] = chunk_report(done, served.engine.fusor.tokenizer)
    return report


def usage(choices: Sequence[Done]) -> dict[str, Any]:
    """OpenAI's `usage` of all choices.

    `cached_tokens` are those whose KV was there before, `recomputed_tokens` how many of the reusable ones were recomputed, in
    the mean over layers 1 and up.
    """
    plan = choices[0].answer.plan
    completion_tokens = sum(len(done.answer.token_ids) for done in choices)
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
