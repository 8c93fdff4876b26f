"""`/v1/chat/completions` and `/v1/completions`: from a body to the scheduler, and answers at once or streamed."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from cacheblend.base.errors import MissingExtraError
from cacheblend.base.threads import Check
from cacheblend.service.engine.chat_template import SWITCHES
from cacheblend.service.engine.decoding import Piece, Sampling
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.grammar import GrammarCompiler
from cacheblend.service.engine.prompt import PromptRenderer
from cacheblend.service.engine.reasoning import Thoughts
from cacheblend.service.engine.request import Done, Event, Failed
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.serving.scheduler import late_error

from .answers import ChatChoice, TextChoice, answer_report, usage
from .guard import JsonRoute, error_body, log_failure, refused
from .schemas import ChatBody, CompletionBody, ToolBody
from .server import Server, run_call, while_client_waits

DEFAULT_NUM_CHUNKS = 6
LATE_S = 1.0  # after the deadline
OF_SAMPLING = {field.name for field in fields(Sampling)}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` as server-sent events.", "content": {"text/event-stream": {}}}
}
router = APIRouter(route_class=JsonRoute)
Body = ChatBody | CompletionBody


@router.post("/v1/chat/completions", responses=ANSWERS)
async def chat(body: ChatBody, request: Request) -> Response:
    """Answer the last message over the nearest chunks, or over the documents given."""
    return await answer_chat(body, request, Generation)


async def answer_chat(body: ChatBody, request: Request, generation: type[Generation]) -> Response:
    """The answer to a chat, in the words of a kind of `Generation`."""
    return await _respond(body, request, await prepare_chat(body, request), partial(generation, choice_class=ChatChoice))


async def prepare_chat(body: ChatBody, request: Request) -> list[PromptRequest]:
    """A chat's one request with its prompt, chunks included."""
    _check_tools(body, request.state.engine.prompts)
    defaults = request.app.state.server.template_kwargs
    return await _prepare(body, request, lambda engine, chat: [lay_out_chat(engine, chat, defaults)])


@router.post("/v1/completions", responses=ANSWERS)
async def completion(body: CompletionBody, request: Request) -> Response:
    """Continue a text, after the documents given or, with `num_chunks`, the chunks nearest it."""
    prepared = await _prepare(body, request, partial(lay_out_completion, words=request.app.state.server.grammars.words))
    return await _respond(body, request, prepared, partial(Generation, choice_class=TextChoice))


@router.post("/v1/chat/completions/explain")
async def explain(body: ChatBody, request: Request) -> dict[str, Any]:
    """Show the passages in a chat's messages, why they are taken for some, and whose KV is stored; nothing is answered."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    server.check_model(body.model)

    def look(_: Check) -> dict[str, Any]:
        laid_out = lay_out_chat(engine, body, server.template_kwargs)
        found = engine.explain(laid_out["layout"], laid_out["passages"], body.cache_salt)
        return {"object": "explanation", "num_chunks": laid_out["num_chunks"], **found}

    return await run_call(server.preparing, request, look)


def _check_tools(body: ChatBody, prompts: PromptRenderer) -> None:
    """Refuse tools that the model cannot call, or that contradict other fields."""
    names, choice = [tool.function.name for tool in body.called_tools], body.tool_choice
    if names and not prompts.template.takes_tools:
        why = "the model's chat template has no place for them; leave them out, give response_format, or use another model"
        raise refused("tools", why, code="unsupported_value")
    if choice not in (None, "none", "auto") and not names:
        raise refused("tool_choice", "there are no tools to call; give tools, or leave it out")
    if isinstance(choice, ToolBody) and choice.function.name not in names:
        raise refused("tool_choice", f"{choice.function.name!r} is none of the tools; name one of them")


def template_kwargs(body: ChatBody, defaults: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The chat template's variables for a chat: what it asks for, before what its effort says, before the defaults."""
    kind, asked = (body.thinking or {}).get("type"), dict(body.chat_template_kwargs or {})
    effort = "none" if kind == "disabled" else body.reasoning_effort
    thinks = kind in ("enabled", "adaptive") or (None if effort is None else effort != "none")
    of_effort = {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, thinks)}
    of_effort = {name: value for name, value in of_effort.items() if name in known and value is not None}
    if body.enable_thinking is not None:
        asked.setdefault(next((name for name in SWITCHES if name in known), SWITCHES[0]), body.enable_thinking)
    return {**defaults, **of_effort, **asked}


def _num_chunks(engine: Engine, body: Body, default: int) -> int:
    """Return how many chunks to retrieve, as many as there are at most; beside documents none, and more are refused."""
    if body.documents is not None and body.num_chunks:
        raise refused("num_chunks", "leave it out beside documents, which are all used", code=None)
    return min(default if body.num_chunks is None else body.num_chunks, engine.retriever.chunk_count)


def lay_out_chat(engine: Engine, body: ChatBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Questions, layout, thoughts, and numbers of chunks and tokens of a chat, as options of `Engine.prepare`."""
    messages = [message.message() for message in body.messages]
    asked = ["", "", *(one.content for one in messages if one.role == "user" and one.content.strip())]  # the last one asks
    passages = engine.find_passages((message.role, message.content) for message in messages)
    are_retrieved = any(one.reason != "paragraph" for one in passages)  # by their form, or they are stored chunks
    default = 0 if body.documents is not None or are_retrieved else DEFAULT_NUM_CHUNKS
    num_chunks = _num_chunks(engine, body, default) if any(asked) or body.documents is not None else 0
    tools = [tool.model_dump(exclude_none=True) for tool in body.called_tools]
    prompts, with_chunks = engine.prompts, num_chunks > 0 or body.brought is not None
    variables = template_kwargs(body, defaults, prompts.template.variables)
    continues = body.continue_final_message or body.messages[-1].prefix
    layout = prompts.chat(messages, with_chunks=with_chunks, tools=tools, template_kwargs=variables, continues=continues)
    return {
        "question": asked[-1],
        "earlier_question": asked[-2],
        "layout": layout,
        "passages": () if with_chunks else passages,
        "thoughts": prompts.thoughts(layout),
        "continues": continues,
        "num_chunks": num_chunks,
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
    }


def lay_out_completion(engine: Engine, body: CompletionBody, words: int) -> Iterator[dict[str, Any]]:
    """The same options of each prompt of a text completion; `words` is the size of the model's vocabulary."""
    num_chunks = _num_chunks(engine, body, 0)
    for prompt in body.prompt:
        if not isinstance(prompt, str) and max(prompt) >= words:
            raise refused("prompt", f"{max(prompt)} is no token id of this model, which has {words}")
        text = prompt if isinstance(prompt, str) else engine.fusor.tokenizer.decode(prompt)
        yield {
            "question": text,
            "layout": engine.prompts.completion(prompt),
            "continues": True,
            "passages": () if body.num_chunks or body.documents else engine.find_passages([("user", text)]),
            "num_chunks": num_chunks,
            "max_tokens": 1 if body.max_tokens == 0 else body.max_tokens,  # that one is left out of the answer
        }


def sampling_of(body: Body, grammars: GrammarCompiler, thoughts: Thoughts | None = None) -> dict[str, Any]:
    """A body's options of `Sampling`, JSON after thoughts; refuses biases of no token and JSON that cannot be had."""
    bias, words, asked = body.logit_bias or {}, grammars.words, body.answer_schemas
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < words)]:
        raise refused("logit_bias", f"{wrong[0][:40]!a} is no token id of this model, which has {words}")
    try:
        grammar = None if asked is None else grammars.json(*asked[1], field=asked[0], thoughts=thoughts)
    except MissingExtraError as error:
        assert asked is not None
        raise refused(asked[0], "JSON needs the extra `structured` where the service runs; leave it out") from error
    given = body.model_dump(include=OF_SAMPLING, exclude_none=True)
    given["logit_bias"] = {int(key): value for key, value in bias.items()}
    return {**given, "logprobs": body.returned_logprobs, "grammar": grammar}


async def _prepare(
    body: Body, request: Request, lay_out: Callable[[Engine, Any], Iterable[dict[str, Any]]]
) -> list[PromptRequest]:
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    # 1. Refuse what needs no work to be refused.
    server.check_model(body.model)
    server.check_count(body.documents)
    prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    choices, limit = prompts * (body.n or 1), server.scheduler.config.max_waiting
    if choices > limit:
        raise refused("prompt" if prompts > 1 else "n", f"{choices} choices exceed max_waiting={limit}; ask for fewer")
    server.scheduler.check_room(request.state.tenant, server.preparing.count(request.state.tenant) + choices - 1)

    # 2. Lay out the prompts and make the grammar, in a thread.
    def prepare(check: Check) -> list[PromptRequest]:
        return [
            engine.prepare(
                **layout,
                method=body.method,
                documents=body.brought,
                filter=body.filter,
                recompute_ratio=body.recompute_ratio,
                max_loss_nats=body.max_loss_nats,
                cache_salt=body.cache_salt,
                tenant=request.state.tenant,
                arrived=request.state.arrived,
                check=check,
                **sampling_of(body, server.grammars, layout.get("thoughts")),
            )
            for layout in lay_out(engine, body)
        ]

    return await run_call(server.preparing, request, prepare)


async def _respond(
    body: Body, request: Request, prepared: Sequence[PromptRequest], begin: Callable[..., Generation]
) -> Response:
    # 3. Submit a request for each choice.
    generation = begin(request, prepared, body)
    try:
        generation.submit()
        # 4. Answer, at once or streamed; an error before the first event is a response of its own, and no stream.
        return await while_client_waits(request, generation.stream() if body.stream else generation.complete())
    except BaseException:
        generation.cancel()
        raise


class Generation:
    """The choices of one client's request, in the scheduler, whose events come to the event loop.

    A prompt's first choice is prefilled, and the others follow it (`Request.follow`), each by a seed of its own.
    """

    def __init__(self, request: Request, prompts: Sequence[PromptRequest], body: Body, choice_class: type[TextChoice]) -> None:
        self._body, self._events = body, asyncio.Queue[tuple[int, Event]]()
        self._server: Server = request.app.state.server
        self._state = request.state
        kind = choice_class.piece_kind if body.stream else choice_class.kind
        self._head: dict[str, Any] = {"id": f"{choice_class.prefix}-{uuid.uuid4().hex}", "object": kind}
        self._head |= {"created": int(time.time()), "model": self._server.model_name}
        self._served = [one for first in prompts for one in (first, *(first.follow(index) for index in range(1, body.n or 1)))]
        token_bytes, decode = self._server.token_bytes, prompts[0].engine.fusor.tokenizer.decode
        self._choices = [choice_class(index, body, token_bytes, decode) for index in range(len(self._served))]
        for index, served in enumerate(self._served):
            served.deliver = partial(self._deliver, asyncio.get_running_loop(), index)

    def _deliver(self, loop: asyncio.AbstractEventLoop, index: int, event: Event) -> None:
        loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def submit(self) -> None:
        """Put all choices into the scheduler's queue; raises as `Scheduler.submit`."""
        for served in self._served:
            self._server.scheduler.submit(served)

    async def next(self) -> tuple[int, Piece | Done]:
        """The next event, and of which choice.

        Raises:
            DeadlineError: the scheduler has not ended the request at its deadline, as one of its steps is longer.
            CacheBlendError: the error of a choice that failed.
        """
        deadline_s = self._server.scheduler.config.deadline_s
        left_s = self._served[0].asked.arrived + deadline_s + LATE_S - time.perf_counter()
        try:
            async with asyncio.timeout(max(0.0, left_s)):  # an event that is there is had at once, however late it is
                index, event = await self._events.get()
        except TimeoutError:
            raise late_error(deadline_s) from None
        if isinstance(event, Failed):
            raise event.error
        return index, event if self._body.max_tokens != 0 else _without_tokens(event)

    async def stream(self) -> Response:
        """The answer event by event, once the first one is there."""
        return EventStream(self, await self.next())

    async def complete(self) -> Response:
        """The complete answer, written in a thread: thousands of tokens with their log-probabilities need seconds."""
        done: dict[int, Done] = {}
        while len(done) < len(self._choices):
            index, event = await self.next()
            if isinstance(event, Done):
                done[index] = event

        def write() -> Response:
            made = [choice.add(done[index]) for index, choice in enumerate(self._choices)]
            answer = {**self._head, "choices": made, "usage": self._usage(done), "cacheblend": self._report(done)}
            return JSONResponse(self.shown(answer))

        return await run_in_threadpool(write)

    def shown(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The complete answer in the words of this kind: OpenAI's."""
        return answer

    async def pieces(self, index: int, event: Piece | Done) -> AsyncIterator[str]:
        """The texts of server-sent events, from the first event on."""
        has_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        async for chunk in self.chunks(index, event, has_usage=has_usage):
            yield server_event(chunk)
        if "error" not in chunk:
            yield "data: [DONE]\n\n"

    async def chunks(self, index: int, event: Piece | Done, *, has_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """OpenAI's pieces of the answer, from the first event on; an error ends them."""
        done: dict[int, Done] = {}
        no_usage = {"usage": None} if has_usage else {}  # as OpenAI has it
        while True:
            if isinstance(event, Done):
                done[index] = event
            is_last = len(done) == len(self._choices)
            if (choice := self._choices[index].add(event)) is not None:
                # Calls come one a piece, and before the end, as clients expect them.
                for call in choice.get("delta", {}).get("tool_calls", ()):
                    piece = {**choice, "delta": {**choice["delta"], "tool_calls": [call]}, "finish_reason": None}
                    yield {**self._head, "choices": [{**piece, "stop_reason": None}], **no_usage}
                    choice |= {"delta": {"content": ""}, "logprobs": None}
                report = {"cacheblend": await run_in_threadpool(self._report, done)} if is_last else {}
                yield {**self._head, "choices": [choice], **no_usage, **report}
            if is_last:
                break
            try:
                index, event = await self.next()
            except Exception as error:
                self._server.metrics.errors.labels(str(log_failure(error))).inc()
                yield error_body(error)
                return
        if has_usage:
            yield {**self._head, "choices": [], "usage": await run_in_threadpool(self._usage, done)}

    def _report(self, done: Mapping[int, Done]) -> dict[str, Any] | list[dict[str, Any]]:
        """The report of each prompt's answer; the request's log line sums them up."""
        places = range(0, len(self._served), self._body.n or 1)
        plans, timings = [done[place].answer.plan for place in places], done[0].answer.timings
        self._state.summary = (
            f", tenant={self._state.tenant or '-'} model={self._server.model_name} method={self._body.method} "
            f"prompt_tokens={sum(plan.prompt_tokens for plan in plans)} "
            f"completion_tokens={sum(len(each.answer.token_ids) for each in done.values())} ttft_s={timings.ttft_s:.4f} "
            f"hits={sum(plan.hits for plan in plans)} misses={sum(plan.misses for plan in plans)}"
        )
        reports = [answer_report(self._body, self._served[place], done[place]) for place in places]
        return reports if len(reports) > 1 else reports[0]

    def _usage(self, done: Mapping[int, Done]) -> dict[str, Any]:
        count, has_thoughts = self._served[0].engine.prompts.text_ids, self._served[0].asked.thoughts is not None
        tokens = sum(len(count(each.answer.thoughts)) for each in done.values()) if has_thoughts else None
        return usage(done, self._body.n or 1, tokens)

    def cancel(self) -> None:
        """Give up what has not ended."""
        for served in self._served:
            served.cancel()


def _without_tokens(event: Piece | Done) -> Piece | Done:
    """The event of an answer that has none."""
    if isinstance(event, Piece):
        return replace(event, text="", logprob=None)
    answer = replace(event.answer, text="", token_ids=[])
    return replace(event, answer=answer, finish_reason="length", stop_string=None, last_text="", logprobs=())


def server_event(value: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, allow_nan=False)}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which is cancelled when the response ends, however early.

    Not in the generator: a generator that ends before its first event, because the client left, runs no `finally`.
    """

    def __init__(self, generation: Generation, first: tuple[int, Piece | Done]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(generation.pieces(*first), media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()
