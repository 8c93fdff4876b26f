"""The guard before every request: what its headers decide, whose it is, its body's bounds, and its reading as JSON."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.base.errors import CacheBlendError, InputError, QueueFullError
from cacheblend.base.memory import return_freed_memory
from cacheblend.retriever.document import NO_ID
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.json_lines import check_values

from .config import HOST_NAME, ApiKeys, HttpConfig
from .errors import ApiError, error_response, shortened, validation_error

PAGE_FILES = {"/": "page.html", **{f"/{name}": name for name in ("page.css", "page.js", "api.js", "answer.js", "documents.js")}}
# They need no key, and may only be read.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/openapi.json", *PAGE_FILES})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
ANY_ADDRESS = frozenset({"0.0.0.0", "::", "[::]"})  # what a server on all of a machine's addresses listens on
BODY_S = 300.0  # in which a body comes
DRAIN_S = 5.0  # for which the body of a refused request is read and dropped
UNCOUNTED_BYTES = 2**16  # of each body; so many of every connection have room in any case
BODIES_OF_TENANT, BODIES = 2, 4  # of `max_body_bytes` each, that are in memory at once
RETRY_AFTER_S = 5
LARGE_BYTES = 2**20  # some time after such a body is answered, freed memory goes back to the system
RETURN_AFTER_S = 5.0
SMALL_BYTES = 2**14  # a body that is read in less time than a thread needs to begin
_Model = TypeVar("_Model", bound=BaseModel)


class Guard:
    """Middleware: refuses by Host, key, Origin, path, framing and Content-Type, in this order, then bounds the body.

    - 421, without keys: a Host that is not this service's. A web page whose own name was pointed at this machine (DNS
      rebinding) is of the same origin as the API for a browser, and only its Host distinguishes it from a page of ours.
    - 401, with tenants or an API key: no key, or none that is known, on every path that is not in `PUBLIC_PATHS`.
    - 403: a write from a web page of another origin that `cors_origins` does not name.
    - 400: a path with control characters; a body of a request that only reads; a body framed in two ways; a body that is not
      said to be JSON, which a browser sends without asking first (of a form to `/v1/documents` only the Origin is checked).
    - 413: a body longer than `max_body_bytes` (documents) or `max_completion_bytes`. 408: one that does not come in `body_s`.
    - 429: bodies of one tenant that together are more than `BODIES_OF_TENANT` of the longest, or of all together more than
      `BODIES`; a body counts until its response ends.

    What is let through has `tenant` and `engine` in its state, and its body is in memory.

    Args:
        app: the application that is guarded.
        http: hosts, origins and limits.
        keys: of the tenants.
        engines: by tenant; "" where there are none.
        body_s: seconds for a body.
    """

    def __init__(
        self, app: ASGIApp, http: HttpConfig, keys: ApiKeys, engines: Mapping[str, Engine], body_s: float = BODY_S
    ) -> None:
        self._app, self._http, self._keys, self._engines, self._body_s = app, http, keys, engines, body_s
        named = frozenset(name.lower() for name in http.allowed_hosts)
        bound = http.host.lower() if re.fullmatch(HOST_NAME, http.host) else f"[{http.host.lower()}]"
        self._hosts = None if keys.required and not named else OWN_HOSTS | named | {bound}
        self._accepts_addresses = http.host in ANY_ADDRESS
        self._held = Counter[str]()  # bytes of bodies, by tenant
        self._longest = max(http.max_body_bytes, http.max_completion_bytes)
        self._returns_memory = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, value)
        has_body = headers.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in headers
        try:
            self._check(scope, headers, has_body)
        except ApiError as error:
            await self._refuse(error, has_body, scope, receive, send)
            return
        if not has_body:
            await self._app(scope, receive, send)
            return
        with self._counted(scope["state"].get("tenant", "")) as count:
            try:
                body = await self._read(scope, headers, receive, count)
            except CacheBlendError as error:
                await self._refuse(error, has_body, scope, receive, send)
                return
            if body is None:
                return
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body  # the app's is the only one

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, replay, send)

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes], has_body: bool) -> None:
        path, writes = scope["path"], scope["method"] not in READING
        host = headers.get(b"host", b"").decode("latin-1").lower()
        self._check_host(host)
        tenant = self._keys.tenant(headers[b"authorization"].decode("latin-1") if b"authorization" in headers else None)
        if tenant is not None:
            scope.setdefault("state", {}).update(tenant=tenant, engine=self._engines[tenant])
        elif path not in PUBLIC_PATHS or writes:
            message = "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        if writes and b"origin" in headers:
            self._check_origin(headers[b"origin"].decode("latin-1"), host)
        if NO_ID.search(path):
            message = "the path has a control character, or a byte that is no UTF-8; no document has such an id"
            raise ApiError(400, message, code="invalid_value")
        if has_body:
            self._check_framing(scope["method"], path, headers)

    @staticmethod
    def _check_framing(method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        if method in READING:
            raise ApiError(400, f"{method} requests have no body; leave it out", code="invalid_value")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise ApiError(400, "the body has a Content-Length and a Transfer-Encoding; send one of them", code="invalid_value")
        sent = headers.get(b"content-type", b"").decode("latin-1")
        kind = sent.partition(";")[0].strip().lower()
        is_form = path == "/v1/documents" and kind == "multipart/form-data"
        if not is_form and not re.fullmatch(r"application/([\w.-]+\+)?json", kind, re.ASCII):
            came = shortened(sent) if sent else "no Content-Type"
            raise ApiError(400, f"the body came with {came}; send JSON with Content-Type: application/json")

    def _check_host(self, host: str) -> None:
        if self._hosts is None:
            return
        named = re.fullmatch(rf"({HOST_NAME})\.?(:\d*)?", host)
        name = named[1].removesuffix(".") if named else ""
        if name in self._hosts or (self._accepts_addresses and _is_address(name)):
            return
        message = f"this service is not called {shortened(host)}; if it is, name that in allowed_hosts (--allowed-hosts)"
        raise ApiError(421, message, code="unknown_host")

    def _check_origin(self, origin: str, host: str) -> None:
        allowed = self._http.cors_origins
        if "*" in allowed or origin in allowed or (host and _address_of(origin) == host):
            return
        message = f"pages of {shortened(origin)} may not change anything here; name that in cors_origins if they should"
        raise ApiError(403, message, code="foreign_origin")

    @staticmethod
    async def _refuse(error: Exception, has_body: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error; the connection of a request with a body ends, after the body or `DRAIN_S` of it."""
        response = error_response(error)
        if not has_body:
            await response(scope, receive, send)
            return
        # The server closes the connection after the response's last message, and a client that still sends then sees no answer.
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    async def _read(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, count: Callable[[int], None]
    ) -> bytes | None:
        """The body; None where the client has gone.

        Raises:
            ApiError: 413 or 408.
            QueueFullError: there are too many bytes of bodies.
        """
        name, max_bytes = "max_body_bytes", self._http.max_body_bytes
        if not scope["path"].startswith("/v1/documents") and self._http.max_completion_bytes < max_bytes:
            name, max_bytes = "max_completion_bytes", self._http.max_completion_bytes
        why = f"the body is longer than {name}={max_bytes}; send less, or in parts"
        too_long = ApiError(413, why, code="body_too_long")
        if (declared := headers.get(b"content-length", b"0")).isdigit() and int(declared) > max_bytes:
            raise too_long
        parts, read_bytes = list[bytes](), 0
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    read_bytes += len(parts[-1])
                    if read_bytes > max_bytes:
                        raise too_long
                    count(read_bytes)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            why = f"the body did not come within {self._body_s:g} s; send it again"
            raise ApiError(408, why, code="body_timeout") from None

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


def _address_of(origin: str) -> str:
    """Host and port of an origin; nothing of what is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # "http://[" and the like
        return ""


def _is_address(name: str) -> bool:
    """Whether a host is an address, which no name server can point elsewhere."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class JsonRoute(APIRoute):
    """A route whose endpoint is called with the body that `read_json` read; FastAPI would read it on the event loop.

    Such an endpoint has the arguments `body` and `request`, and those of its path.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint's call; FastAPI's own for an endpoint without a body."""
        if self.body_field is None:
            return super().get_route_handler()
        model = self.body_field.field_info.annotation
        assert isinstance(model, type), "a route has one model as its body"
        assert issubclass(model, BaseModel), "a route has one model as its body"

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
