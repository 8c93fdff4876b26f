"""`/v1/chat/completions` and `/v1/completions`: complete or streamed answers, and how they were made."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from cacheblend.base.progress import Check
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import PromptLayout, PromptRenderer, question_place
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.engine.request import chunk_origin
from cacheblend.service.serving.sampling import TokenLogprob
from cacheblend.service.serving.served_request import Done, Failed, Piece
from cacheblend.service.serving.text_stream import TextStream

from .errors import ApiError, error_body
from .generation import EventStream, Generation, sampling_of, server_event
from .guard import JsonRoute
from .schemas import ChatBody, CompletionBody, GenerationBody, NamedTool
from .server import Server, run_call
from .tools import CallReader

DEFAULT_NUM_CHUNKS = 6
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` as server-sent events.", "content": {"text/event-stream": {}}}
}
router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=ANSWERS)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer the last message over the nearest chunks, or over the documents given."""
    _check_tools(body, request.state.engine.prompts)
    return await _respond(body, request, ChatChoice, prepare_chat)


@router.post("/v1/completions", responses=ANSWERS)
async def completion(body: CompletionBody, request: Request) -> Response:
    """Continue a text, after the documents given or, with `num_chunks`, the chunks nearest it."""
    return await _respond(body, request, TextChoice, prepare_completion)


def _check_tools(body: ChatBody, prompts: PromptRenderer) -> None:
    """Refuse tools that cannot be called.

    Raises:
        ApiError: the model supports no tools, or fields contradict each other.
    """
    names = [tool.function.name for tool in body.called_tools]
    if names and not prompts.takes_tools:
        message = (
            "tools: the model's chat template has no place for them; leave them out, ask for JSON with response_format, "
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


def prepare_chat(engine: Engine, body: ChatBody, check: Check) -> PromptRequest:
    """Lay a chat out over the chunks or documents that its body asks for."""
    if body.documents is not None and body.num_chunks:
        raise ApiError(400, "num_chunks: leave it out beside documents, which are all used", param="num_chunks")
    num_chunks = 0 if body.documents is not None else body.num_chunks
    if num_chunks is None:
        num_chunks = min(DEFAULT_NUM_CHUNKS, engine.retriever.chunk_count)
    messages = [message.message() for message in body.messages]
    tools = [tool.tool() for tool in body.called_tools]
    layout = engine.prompts.chat(messages, with_chunks=num_chunks > 0 or body.documents is not None, tools=tools)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _prepare(engine, body, layout, messages[question_place(messages)].content, num_chunks, max_tokens, check)


def prepare_completion(engine: Engine, body: CompletionBody, check: Check) -> PromptRequest:
    """Lay a text out after the chunks or documents that its body asks for."""
    layout = engine.prompts.completion(body.text())
    return _prepare(engine, body, layout, body.text(), body.num_chunks or 0, body.max_tokens, check)


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
        num_chunks=num_chunks,
        method=body.method,
        documents=None if body.documents is None else [document.model_dump() for document in body.documents],
        recompute_ratio=body.recompute_ratio,
        max_tokens=max_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        cache_salt=body.cache_salt,
        check=check,
    )


async def _respond(
    body: GenerationBody,
    request: Request,
    choice_class: type[TextChoice],
    prepare: Callable[[Engine, Any, Check], PromptRequest],
) -> Response:
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    # 1. Refuse what needs no work to be refused.
    server.check_model(body.model)
    num_choices = body.n or 1
    server.scheduler.check_room(request.state.tenant, server.preparing.count(request.state.tenant) + num_choices - 1)
    if body.documents is not None and len(body.documents) > server.http.max_documents:
        message = f"documents: {len(body.documents)} are more than max_documents={server.http.max_documents}; give fewer"
        raise ApiError(400, message, param="documents", code="too_many_documents")
    # 2. Lay out the prompt and make the grammar, in a thread.
    prepared, sampling = await run_call(
        server.preparing, request, lambda check: (prepare(engine, body, check), sampling_of(body, server.grammars))
    )
    # 3. Submit a request for each choice.
    generation = Generation(request, prepared, sampling, body)
    generation.submit()
    # 4. Answer, streamed or at once.
    head = {"id": f"{choice_class.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": server.model_name}
    choices = [choice_class(index, body, server.token_text) for index in range(num_choices)]
    if body.stream:
        first = await generation.first()
        return EventStream(_stream(body, choices, generation, first, {**head, "object": choice_class.piece_kind}), generation)
    done = await generation.all_done()
    report = {**head, "object": choice_class.kind}
    return await run_in_threadpool(_complete, body, choices, generation, done, report)


def _complete(
    body: GenerationBody, choices: Sequence[TextChoice], generation: Generation, done: Sequence[Done], head: dict[str, Any]
) -> Response:
    """The complete answer; in a thread, since thousands of tokens with their log-probabilities need seconds."""
    report = answer_report(body, generation, done[0])
    made = [choice.complete(one) for choice, one in zip(choices, done, strict=True)]
    return JSONResponse({**head, "choices": made, "usage": usage(done), "cacheblend": report})


async def _stream(
    body: GenerationBody,
    choices: Sequence[TextChoice],
    generation: Generation,
    first: tuple[int, Piece | Done],
    head: dict[str, Any],
) -> AsyncIterator[str]:
    """The events' texts."""
    done: dict[int, Done] = {}
    async for place, event in generation.events(*first):
        if isinstance(event, Failed):
            yield server_event(error_body(event.error))
            return
        if (choice := choices[place].piece(event)) is None:
            continue
        piece = {**head, "choices": [choice]}
        if isinstance(event, Done):
            done[place] = event
            if len(done) == len(choices):
                piece["cacheblend"] = await run_in_threadpool(answer_report, body, generation, done[0])
        yield server_event(piece)
    if body.stream_options is not None and body.stream_options.include_usage:
        yield server_event({**head, "choices": [], "usage": usage([done[place] for place in sorted(done)])})
    yield "data: [DONE]\n\n"


class TextChoice:
    """One choice of a text completion, complete or in pieces.

    Args:
        index: among the answer's choices.
        body: what was asked.
        token_text: text of a token by itself.
    """

    prefix = "cmpl"
    kind = piece_kind = "text_completion"

    def __init__(self, index: int, body: GenerationBody, token_text: Callable[[int], str]) -> None:
        self._index, self._token_text = index, token_text
        self._has_logprobs = body.returned_logprobs is not None
        self._reader = CallReader(
            [tool.function.name for tool in body.called_tools], 1 if body.parallel_tool_calls is False else None
        )
        self._pending: list[TokenLogprob] = []  # of tokens whose text is held back
        self._offset: int | None = None  # characters so far; None before the first piece

    def complete(self, done: Done) -> dict[str, Any]:
        """The choice of a complete answer."""
        text, calls = self._reader.finish(done.answer.text)
        logprobs = self.logprobs(done.logprobs, 0) if self._has_logprobs else None
        reason = "tool_calls" if calls else done.finish_reason
        return {"index": self._index, **self.message(text, calls), "logprobs": logprobs, "finish_reason": reason}

    def piece(self, event: Piece | Done) -> dict[str, Any] | None:
        """The choice of a streamed piece; None where nothing is certain yet."""
        calls, reason = list[dict[str, Any]](), None
        if isinstance(event, Done):
            text, calls = self._reader.finish(event.last_text)
            reason = "tool_calls" if calls else event.finish_reason
        else:
            text = self._reader.add(event.text)
            self._pending += [event.logprob] if event.logprob is not None else []
            if not text and self._offset is not None:
                return None
        logprobs = self.logprobs(self._pending, self._offset or 0) if self._has_logprobs else None
        delta = self.delta(text, calls, first=self._offset is None)
        self._pending, self._offset = [], (self._offset or 0) + len(text)
        return {"index": self._index, **delta, "logprobs": logprobs, "finish_reason": reason}

    def message(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:  # only chats have calls
        """Text and calls of a complete answer."""
        return {"text": text}

    def delta(self, text: str, calls: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
        """Text and calls of a piece."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Log-probabilities of tokens that begin `offset` characters after the answer's start."""
        texts = [self._token_text(each.token_id) for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                {self._token_text(token): logprob for token, logprob in ((each.token_id, each.logprob), *each.likeliest)}
                for each in tokens
            ],
            "text_offset": list(accumulate(map(len, texts), initial=offset))[: len(texts)],
        }


class ChatChoice(TextChoice):
    """One choice of a chat completion, complete or in pieces."""

    prefix = "chatcmpl"
    kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def message(self, text: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Text and calls of a complete answer."""
        made = {"content": text or None, "tool_calls": list(calls)} if calls else {"content": text}
        return {"message": {"role": "assistant", **made}}

    def delta(self, text: str, calls: Sequence[Mapping[str, Any]], *, first: bool) -> dict[str, Any]:
        """Text and calls of a piece."""
        made: dict[str, Any] = {"role": "assistant", "content": text} if first else {"content": text}
        if calls:
            made["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        return {"delta": made}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:  # only texts have offsets
        """Log-probabilities of tokens."""

        def reported(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._token_text(token_id)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = [
            {**reported(each.token_id, each.logprob), "top_logprobs": [reported(*likely) for likely in each.likeliest]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


def answer_report(body: GenerationBody, generation: Generation, done: Done) -> dict[str, Any]:
    """`cacheblend` of a response: method, hits, ratio, times and, where they are asked for, the chunks."""
    served = generation.served[0]
    plan, timings = done.answer.plan, done.answer.timings
    report = {
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
        "prepare_s": served.prepared.retrieved - served.arrived,
    }
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
