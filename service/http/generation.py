"""A client's answer on its way: prepared, submitted once for each choice, its events brought to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Self

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cacheblend.base.errors import DeadlineError, MissingExtraError
from cacheblend.base.progress import Check
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.prompt import PromptLayout
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.serving.sampling import Sampling
from cacheblend.service.serving.served_request import Done, Event, Failed, Piece, ServedRequest

from ..serving.grammar import ANY_OBJECT
from .errors import ApiError
from .schemas import GenerationBody
from .server import LOOK_FOR_CLIENT_S, Server, arrived, run_call

LATE_S = 1.0  # so long after its deadline a request that the scheduler has not ended is answered all the same
Prepare = Callable[[Check], PromptRequest]


class Generation:
    """The choices of one client's request, in the scheduler; made by `begin`.

    The first choice is prefilled, and the others go on from its prompt; see `ServedRequest`.

    Attributes:
        served: a request for each choice.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._server = request, request.app.state.server
        self._events = asyncio.Queue[tuple[int, Event]]()
        self._look_at = time.perf_counter() + LOOK_FOR_CLIENT_S
        self.served: list[ServedRequest] = []

    @classmethod
    async def begin(cls, body: GenerationBody, request: Request, prepare: Prepare) -> Self:
        """Check a request, prepare it, and submit it.

        Args:
            body: what is asked for.
            request: by whom.
            prepare: lays out the prompt, in a thread.

        Raises:
            ApiError: there is no such model, or a field is not allowed.
            QueueFullError, ShuttingDownError, DeadlineError: see `run_call` and `Scheduler.submit`.
        """
        server: Server = request.app.state.server
        engine: Engine = request.state.engine
        tenant, choices = request.state.tenant, body.n or 1
        # 1. Refuse what needs no work to be refused.
        server.check_model(body.model)
        server.scheduler.check_room(tenant, server.preparing.count(tenant) + choices - 1)
        if body.documents is not None and len(body.documents) > server.http.max_documents:
            message = f"documents: {len(body.documents)} are more than max_documents={server.http.max_documents}; give fewer"
            raise ApiError(400, message, param="documents", code="too_many_documents")
        # 2. Lay out the prompt and make the grammar, in a thread.
        prepared, sampling = await run_call(
            server.preparing, request, lambda check: (prepare(check), sampling_of(body, server))
        )
        # 3. Submit a request for each choice.
        loop, generation = asyncio.get_running_loop(), cls(request)

        def deliver_to(index: int) -> Callable[[Event], None]:
            def deliver(event: Event) -> None:
                loop.call_soon_threadsafe(generation._events.put_nowait, (index, event))

            return deliver

        for index in range(choices):
            generation.served.append(
                ServedRequest(
                    engine,
                    prepared if index == 0 else replace(prepared),
                    deliver_to(index),
                    tenant=tenant,
                    sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index),
                    stop=body.stop_strings(),
                    own_ratio=body.recompute_ratio is not None,
                    arrived=arrived(request),
                    leader=generation.served[0] if index else None,
                )
            )
        try:
            for served in generation.served:
                server.scheduler.submit(served)
        except BaseException:
            generation.cancel()
            raise
        return generation

    async def next(self) -> tuple[int, Event]:
        """Wait for the next event, and return it with its choice's number; look for the client and the deadline now and then.

        Raises:
            ApiError: 499, the client has gone.
            DeadlineError: the request is late, and the scheduler has not ended it.
        """
        deadline_s = self._server.scheduler.config.deadline_s
        while True:
            if (now := time.perf_counter()) >= self._look_at:  # by the clock: a request that decodes has always an event
                self._look_at = now + LOOK_FOR_CLIENT_S
                if await self._request.is_disconnected():
                    raise ApiError(499, "the client went away")  # only the log shows it
                if now > self.served[0].arrived + deadline_s + LATE_S:
                    raise DeadlineError(f"no answer within deadline_s={deadline_s:g}; ask for less, or later")
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), LOOK_FOR_CLIENT_S)

    async def first(self) -> tuple[int, Piece | Done]:
        """Wait for the first event; an error is raised, so that its response is not a stream."""
        try:
            index, event = await self.next()
            if isinstance(event, Failed):
                raise event.error
        except BaseException:
            self.cancel()
            raise
        return index, event

    async def all_done(self) -> list[Done]:
        """Wait for all choices' answers, and return them in order."""
        done: dict[int, Done] = {}
        try:
            while len(done) < len(self.served):
                index, event = await self.next()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Done):
                    done[index] = event
        finally:
            self.cancel()
        return [done[index] for index in range(len(self.served))]

    async def events(self, index: int, event: Piece | Done) -> AsyncIterator[tuple[int, Event]]:
        """The first event and those after it, to the end of the last choice, or of one that failed.

        The stream's response looks for the client itself.
        """
        ended = 0
        following: Event = event
        while True:
            yield index, following
            ended += isinstance(following, Done)
            if isinstance(following, Failed) or ended == len(self.served):
                return
            index, following = await self._events.get()

    def cancel(self) -> None:
        """Nobody waits any more; does nothing to what has ended."""
        for served in self.served:
            served.cancel()


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which is cancelled when the response ends, however early.

    Not in the generator: one that the client's going away ends before its first event runs no `finally`.
    """

    def __init__(self, events: AsyncIterator[str], generation: Generation) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


def server_event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


def prepare_prompt(
    engine: Engine,
    body: GenerationBody,
    layout: PromptLayout,
    question: str,
    num_chunks: int,
    max_tokens: int | None,
    check: Check,
) -> PromptRequest:
    """`Engine.prepare` with a body's options."""
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


def sampling_of(body: GenerationBody, server: Server) -> Sampling:
    """A body's options of sampling beside those of `prepare_prompt`.

    Raises:
        ApiError: a bias is of no token; JSON cannot be asked for here.
        InputError: a schema that cannot be enforced.
    """
    words = server.grammars.words
    bias = body.logit_bias or {}
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < words)]:
        message = f"logit_bias: {wrong[0][:40]!a} is no token id of this model, which has {words}"
        raise ApiError(400, message, param="logit_bias", code="invalid_value")
    field, schema = "tool_choice", body.forced_call
    if schema is None and body.response_format is not None and body.response_format.type != "text":
        own = body.response_format.json_schema
        field, schema = "response_format", ANY_OBJECT if own is None else own.schema_
    try:
        grammar = None if schema is None else server.grammars.json(schema, field)
    except MissingExtraError as error:
        remedy = f"{field}: JSON needs the extra `structured` where the service runs; leave it out"
        raise ApiError(400, remedy, param=field) from error
    return Sampling(
        seed=body.seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        min_p=body.min_p or 0.0,
        logit_bias={int(key): value for key, value in bias.items()},
        logprobs=body.returned_logprobs,
        grammar=grammar,
    )
