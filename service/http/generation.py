"""A client's answer on its way: a request for each choice in the scheduler, whose events come to the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cacheblend.base.errors import DeadlineError, MissingExtraError
from cacheblend.service.engine.request import Request as PromptRequest
from cacheblend.service.serving.grammar import ANY_OBJECT, GrammarCompiler
from cacheblend.service.serving.sampling import Sampling
from cacheblend.service.serving.served_request import Done, Event, Failed, Piece, ServedRequest

from .errors import ApiError
from .schemas import GenerationBody
from .server import LOOK_FOR_CLIENT_S, Server, arrived

LATE_S = 1.0  # so long after its deadline a request that the scheduler has not ended is answered all the same


class Generation:
    """The choices of one client's request, in the scheduler.

    The first choice is prefilled, and the others go on from its prompt; see `ServedRequest`.

    Args:
        request: the client's.
        prepared: its prompt.
        sampling: how tokens are drawn; each choice has a seed of its own.
        body: what is asked for.

    Attributes:
        served: a request for each choice.
    """

    def __init__(self, request: Request, prepared: PromptRequest, sampling: Sampling, body: GenerationBody) -> None:
        self._request = request
        self._server: Server = request.app.state.server
        self._events = asyncio.Queue[tuple[int, Event]]()
        self._looked = time.monotonic()
        self.served: list[ServedRequest] = []
        for index in range(body.n or 1):
            self.served.append(
                ServedRequest(
                    request.state.engine,
                    replace(prepared) if index else prepared,
                    self._deliver_to(index),
                    tenant=request.state.tenant,
                    sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index),
                    stop=body.stop_strings(),
                    own_ratio=body.recompute_ratio is not None,
                    arrived=arrived(request),
                    leader=self.served[0] if index else None,
                )
            )

    def _deliver_to(self, index: int) -> Callable[[Event], None]:
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver

    def submit(self) -> None:
        """Put all choices into the scheduler's queue, or none.

        Raises:
            QueueFullError, ShuttingDownError: see `Scheduler.submit`.
        """
        try:
            for served in self.served:
                self._server.scheduler.submit(served)
        except BaseException:
            self.cancel()
            raise

    async def next(self) -> tuple[int, Event]:
        """The next event, and of which choice; every `LOOK_FOR_CLIENT_S` it is looked for client and deadline.

        Raises:
            ApiError: 499, the client has gone.
            DeadlineError: it is late.
        """
        deadline_s = self._server.scheduler.config.deadline_s
        while True:
            if time.monotonic() >= self._looked + LOOK_FOR_CLIENT_S:
                self._looked = time.monotonic()
                if await self._request.is_disconnected():
                    raise ApiError(499, "the client has left")  # only the log shows it
                if time.perf_counter() > self.served[0].arrived + deadline_s + LATE_S:  # a step may be longer than that
                    raise DeadlineError(f"no answer within deadline_s={deadline_s:g}; ask for less, or later")
            try:
                return await asyncio.wait_for(self._events.get(), LOOK_FOR_CLIENT_S)
            except TimeoutError:
                pass

    async def first(self) -> tuple[int, Piece | Done]:
        """The first event; one that is an error is raised, so that its response is plain and no stream."""
        try:
            index, event = await self.next()
            if isinstance(event, Failed):
                raise event.error
        except BaseException:
            self.cancel()
            raise
        return index, event

    async def all_done(self) -> list[Done]:
        """All choices' answers, in order."""
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
        """The first event and those after it, to the end of the last choice, or of one that failed."""
        ended = 0
        following: Event = event
        while True:
            yield index, following
            ended += isinstance(following, Done)
            if isinstance(following, Failed) or ended == len(self.served):
                return
            index, following = await self._events.get()

    def cancel(self) -> None:
        """Give up what has not ended."""
        for served in self.served:
            served.cancel()


class EventStream(StreamingResponse):
    """Server-sent events of a generation, which is cancelled when the response ends, however early.

    Not in the generator: a generator that ends before its first event, because the client left, runs no `finally`.
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


def sampling_of(body: GenerationBody, grammars: GrammarCompiler) -> Sampling:
    """A body's options of sampling that `Engine.prepare` has not.

    Raises:
        ApiError: a bias is of no token; JSON cannot be asked for here.
        InputError: a schema that cannot be enforced.
    """
    bias, words = body.logit_bias or {}, grammars.words
    if wrong := [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < words)]:
        message = f"logit_bias: {wrong[0][:40]!a} is no token id of this model, which has {words}"
        raise ApiError(400, message, param="logit_bias", code="invalid_value")
    field, schema = "tool_choice", body.forced_call
    if schema is None and body.response_format is not None and body.response_format.type != "text":
        own = body.response_format.json_schema
        field, schema = "response_format", ANY_OBJECT if own is None else own.schema_
    try:
        grammar = None if schema is None else grammars.json(schema, field)
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
