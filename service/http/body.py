"""Bodies: bounded while they come, then read as JSON and checked in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.base.errors import CacheBlendError, InputError, QueueFullError
from cacheblend.base.memory import return_freed_memory
from cacheblend.service.engine.json_lines import check_values

from .config import HttpConfig
from .errors import ApiError, error_response, validation_error

STALL_S = 20.0  # without a byte of a body
BODY_S = 300.0  # for the whole of it
UNCOUNTED_BYTES = 2**16  # of each body; so many of every connection have room in any case
BODIES_OF_TENANT, BODIES = 2, 4  # of `max_body_bytes` each, that are in memory at once
RETRY_AFTER_S = 5
LARGE_BYTES = 2**20  # some time after such a body is answered, freed memory goes back to the system
# What comes of a tenant's bodies beyond `LARGE_BYTES` of each, read or refused: in one go, and then a second. Without a pace
# clients that send large bodies alone have the processors that others' answers are computed with.
BURST_BYTES, BYTES_PER_S = 2**26, 2**23
LONGEST_PACE_S = 30.0
RETURN_AFTER_S = 5.0
SMALL_BYTES = 2**14  # read in less time than a thread takes to begin
_Model = TypeVar("_Model", bound=BaseModel)


class BodyLimit:
    """Middleware: a body that is longer than its route takes is answered with 413, one that does not come with 408.

    Documents may have `max_body_bytes`, everything else `max_completion_bytes`. A body is read whole, then the app begins.
    Until its response ends it counts: bodies of one tenant that together are more than `BODIES_OF_TENANT` of the longest, or of
    all together more than `BODIES`, are answered with 429. What is large is taken in no faster than `BYTES_PER_S`.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig) -> None:
        self._app, self._http = app, http
        self._held = Counter[str]()  # bytes, by tenant
        self._longest = max(http.max_body_bytes, http.max_completion_bytes)
        self._paid_until: dict[str, float] = {}  # when a tenant's large bodies so far have had their time
        self._returns_memory = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = scope.get("state", {}).get("tenant", "")
        with self._counted(tenant) as count:
            try:
                body = await self._read(scope, receive, tenant, count)
            except CacheBlendError as error:
                response = error_response(error)
                if response.status_code == 408:
                    response.headers["Connection"] = (
                        "close"  # else what comes of the body is dropped, and the client sees the answer
                    )
                await response(scope, receive, send)
                return
            if body is None:
                return
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body  # the app's is the only one

            async def replay() -> Message:
                return whole.pop() if whole else await receive()

            await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, tenant: str, count: Callable[[int], None]) -> bytes | None:
        """The body; None where the client has gone.

        Raises:
            ApiError: 413 or 408.
            QueueFullError: there are too many bytes of bodies.
        """
        name, most_bytes = self._limit(scope)
        if (declared_bytes := _declared_bytes(scope)) > most_bytes:
            await self._pace(tenant, min(declared_bytes, self._longest))  # the server drops what comes of it
            raise _too_long(name, most_bytes)
        parts, read_bytes = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    async with asyncio.timeout(STALL_S):
                        message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    read_bytes += len(parts[-1])
                    if read_bytes > most_bytes:
                        raise _too_long(name, most_bytes)
                    count(read_bytes)
                    if read_bytes > LARGE_BYTES:
                        await self._pace(tenant, len(parts[-1]))
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            why = f"the body did not come: {STALL_S:g} s without a byte, or {BODY_S:g} s in all; send it again"
            raise ApiError(408, why, code="body_timeout") from None

    async def _pace(self, tenant: str, more_bytes: int) -> None:
        """Wait until what the tenant sent before has had its time; meanwhile the connection is not read."""
        now = time.monotonic()
        paid_until = max(now - BURST_BYTES / BYTES_PER_S, self._paid_until.get(tenant, 0.0))
        self._paid_until[tenant] = min(paid_until + more_bytes / BYTES_PER_S, now + LONGEST_PACE_S)
        if paid_until > now:
            await asyncio.sleep(paid_until - now)

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Counts a body; the function is given how many bytes of it have come, and raises QueueFullError."""
        counted = 0

        def count(read_bytes: int) -> None:
            nonlocal counted
            more = max(0, read_bytes - UNCOUNTED_BYTES) - counted
            if more and (
                self._held[tenant] + more > BODIES_OF_TENANT * self._longest
                or self._held.total() + more > BODIES * self._longest
            ):
                raise QueueFullError(
                    f"unanswered requests have too many bytes of bodies together; try again in {RETRY_AFTER_S} s",
                    RETRY_AFTER_S,
                )
            self._held[tenant] += more
            counted += more

        try:
            yield count
        finally:
            self._held[tenant] -= counted
            self._held += Counter()  # without the tenants that have none
            if counted > LARGE_BYTES and not self._returns_memory:
                self._returns_memory = True
                asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return_memory)

    def _return_memory(self) -> None:
        self._returns_memory = False
        threading.Thread(target=return_freed_memory, daemon=True).start()

    def _limit(self, scope: Scope) -> tuple[str, int]:
        most_bytes, name = self._http.max_body_bytes, "max_body_bytes"
        if not scope["path"].startswith("/v1/documents") and self._http.max_completion_bytes < most_bytes:
            most_bytes, name = self._http.max_completion_bytes, "max_completion_bytes"
        return name, most_bytes


def _too_long(name: str, most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {name}={most_bytes}; send less, or in parts", code="body_too_long")


def _declared_bytes(scope: Scope) -> int:
    """What `Content-Length` says; 0 where nothing does."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(declared) if declared.isdigit() else 0


class JsonRoute(APIRoute):
    """A route whose endpoint is called with the body that `read_json` read; FastAPI would read it on the event loop.

    Such an endpoint has the arguments `body` and `request`, and those of its path.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint's call; FastAPI's own for an endpoint without a body."""
        if self.body_field is None:
            return super().get_route_handler()
        model = self.body_field.field_info.annotation
        assert isinstance(model, type), "a route takes one model as its body"
        assert issubclass(model, BaseModel), "a route takes one model as its body"

        async def handle(request: Request) -> Response:
            body = await read_json(request, model)
            answer = await self.endpoint(body=body, request=request, **request.path_params)
            return answer if isinstance(answer, Response) else JSONResponse(answer, self.status_code or 200)

        return handle


async def read_json(request: Request, model: type[_Model]) -> _Model:
    """A request's body, a large one read in a thread; those of one tenant one after the other. Raises as `read_body` does."""
    raw = b"".join([part async for part in request.stream()])  # `request.body` would hold it until the answer
    if len(raw) <= SMALL_BYTES:
        return read_body(raw, model)
    async with request.app.state.server.reading[request.state.tenant]:
        return await run_in_threadpool(read_body, raw, model)


def read_body(raw: bytes, model: type[_Model]) -> _Model:
    """Read a body and check it.

    Raises:
        ApiError: 400, it is no JSON, or a field is not allowed; 413, see `check_values`.
    """
    try:
        check_values(raw, "the body")
    except InputError as error:
        raise ApiError(413, str(error), code="body_too_large") from None
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise ApiError(400, "the body cannot be read as JSON: it is nested too deep") from None
    except UnicodeDecodeError as error:
        why = f"it is not {error.encoding} ({error.reason} at byte {error.start})"
        raise ApiError(400, f"the body cannot be read as JSON: {why}") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except ValueError as error:  # a number with thousands of digits; after the semicolon Python advises the server
        raise ApiError(400, f"the body cannot be read as JSON: {str(error).partition(';')[0]}") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None
