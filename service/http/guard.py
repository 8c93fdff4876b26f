"""The door of the API: a request's id and log line, what headers, key and body decide before an endpoint, and errors."""

import asyncio
import json
import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import prometheus_client
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.base import errors
from cacheblend.base.memory import return_freed_memory
from cacheblend.retriever.document import NO_ID
from cacheblend.service.engine.document_sources import check_json
from cacheblend.service.engine.engine import Engine

from .config import HOST_NAME, HttpConfig, TenantConfig, hash_key
from .schemas import TAGS

logger = logging.getLogger(__name__)
PAGE_PARTS = "page.css page.js api.js answer.js documents.js explain.js markdown.js"
PAGE_FILES = {"/": "page.html", **{f"/{name}": name for name in PAGE_PARTS.split()}}
# They need no key, and may only be read.
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/openapi.json", *PAGE_FILES})
POLLED = "/v1/store", "/v1/ingests"  # by the page, all the time
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
ADMITTED = "admitted"  # in the state of a request that was let through
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
MAX_SHOWN = 80
HEADER = "x-request-id"
INTERNAL = "internal_error"
# HTTP status and code of an error, by the first line that is of its kind.
KNOWN: tuple[tuple[type[Exception], int, str | None], ...] = (
    (errors.QueueFullError, 429, "queue_full"),
    (errors.ShuttingDownError, 503, None),
    (errors.ClientGoneError, 499, None),  # nobody reads it; the log has it
    (errors.DeadlineError, 504, "deadline_exceeded"),
    (errors.StoreFullError, 507, "store_full"),
    (errors.DocumentChangedError, 409, "document_changed"),
    (errors.OtherIndexError, 503, "index_changed"),
    (errors.DamagedDocumentError, 500, "document_damaged"),
    (errors.ConfigError, 400, "invalid_value"),
    (errors.PromptTooLongError, 400, "context_length_exceeded"),
    (errors.InputError, 400, None),
    (Exception, 500, INTERNAL),
)
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# What pydantic finds, where its own words do not say what to do.
REMEDIES = {
    "missing": "is missing; give it",
    "extra_forbidden": "is no field of this request; leave it out",
    "none_required": "is not supported; leave it out",
    "model_type": "must be an object",
}
HELD = "guided_json guided_choice guided_regex guided_grammar structured_outputs json_schema grammar format"
FIELD_REMEDIES = {
    "functions": "are OpenAI's older form of tools; leave them out, and give tools",
    **dict.fromkeys(HELD.split(), "is not supported; give response_format with a JSON schema, which has enum and pattern too"),
    "stop_token_ids": "is not supported; give stop, with their texts",
    "tool_choice.type": 'must be "function", or "allowed_tools" beside tools, with a mode and their names',
    "modalities": 'only ["text"] is supported; leave it out',
    "content.type": "this service reads only text; leave the part out, or send its text",
}
_Model = TypeVar("_Model", bound=BaseModel)


class ApiError(errors.CacheBlendError):
    """A request that the API itself refuses."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def refused(field: str, why: str, status: int = 400, code: str | None = "invalid_value") -> ApiError:
    """The error of a field of a request."""
    return ApiError(status, f"{field}: {why}", param=field, code=code)


def error_body(error: Exception) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`, as Anthropic too; what nobody foresaw, and paths, are in the log."""
    status, code = _status_and_code(error)
    message, param = str(error), error.field if isinstance(error, errors.ConfigError) else getattr(error, "param", None)
    if code == INTERNAL:
        message = "an error inside the service; its log has it under the request's id"
    elif isinstance(error, errors.StoreFullError) and not isinstance(error, errors.BudgetTooSmallError):
        message = "there is no room: the disk or the store's budget is full; the service's log says which"
    elif isinstance(error, errors.OtherIndexError):  # since the service opened it
        message = "`cacheblend reindex` has made the index another model's or embedder's; start the service anew with that"
    kind = KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: Exception) -> JSONResponse:
    """The response to an error, see `log_failure`."""
    status, headers = log_failure(error), dict[str, str]()
    if isinstance(error, errors.QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def log_failure(error: Exception) -> int:
    """Log a failure of the service's own; returns the status of an error's response."""
    status, _ = _status_and_code(error)
    if status >= 500 and not isinstance(
        error, ApiError | errors.ShuttingDownError | errors.DeadlineError | errors.OtherIndexError
    ):
        logger.error("request %s met an error", REQUEST_ID.get(), exc_info=error)
    return status


def _status_and_code(error: Exception) -> tuple[int, str | None]:
    if isinstance(error, ApiError):
        return error.status, error.code
    return next((status, code) for kind, status, code in KNOWN if isinstance(error, kind))


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error that an endpoint, FastAPI or Starlette raised on purpose; `RequestLog` answers the others."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, RequestValidationError):
        error = validation_error(error.errors()[0])
    elif isinstance(error, HTTPException):
        path = request.scope["path"]
        message = f"{request.method[:MAX_SHOWN]} {shortened(path)}: {error.detail}"
        if error.status_code == 404 and (not path.startswith("/v1/") or path.startswith("/v1/v1/")):
            base, added = ("without", "/v1/messages") if "/messages" in path else ("with", "/chat/completions")
            message += f"; the client's base URL is the service's address {base} /v1, to which it adds paths such as {added}"
        elif path.startswith("/v1/responses"):
            message += "; give the client chat completions, at /v1/chat/completions"
        headers, error = error.headers, ApiError(error.status_code, message)
    response = error_response(error)
    response.headers.update(headers or {})
    return response


def validation_error(first: Mapping[str, Any]) -> ApiError:
    """The error of a field, from the first that pydantic found."""
    kind = first["type"]
    names = [part for part in first["loc"] if part not in ("body", "query", "path", *TAGS)]
    place = [str(name)[:MAX_SHOWN].encode(errors="backslashreplace").decode() for name in names]  # a name may be no Unicode
    param = ".".join(place) or None
    given = "" if kind == "missing" or not place else f", got {shortened(first.get('input'))}"
    field = ".".join(name for name in place if not name.isdecimal()).removeprefix("messages.")
    why = (kind not in ("missing", "value_error") and FIELD_REMEDIES.get(field)) or REMEDIES.get(kind)
    why = why or re.sub(r"^\w+ should", "must", first["msg"].removeprefix("Value error, "))
    return ApiError(400, f"{param or 'the body'}: {why}{given}", param=param, code="invalid_value")


def shortened(value: object) -> str:
    """A client's text, in ASCII and at most `MAX_SHOWN` characters, for a message."""
    text = ascii(value[: 2 * MAX_SHOWN] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class RequestLog:
    """Middleware: assigns each request an id, logs its end, counts errors, and answers unexpected ones.

    The id is the caller's `X-Request-Id` if that is a plain word of at most 64 characters, else a new one.
    """

    def __init__(self, app: ASGIApp, counter: prometheus_client.Counter) -> None:
        self._app, self._errors = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        started, status, method = time.perf_counter(), 0, scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out
        scope.setdefault("state", {})["arrived"] = started

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER.encode(), request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # the response has begun; the server cuts it off
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            if status >= 400:
                self._errors.labels(str(status)).inc()
            path = getattr(scope.get("route"), "path", None)  # the route's template, which has no ids
            seconds = time.perf_counter() - started
            level = logging.DEBUG if status == 200 and method == "GET" and str(path).startswith(POLLED) else logging.INFO
            about = scope["state"].get("summary", "")
            # A status of 0: the client left before there was one.
            logger.log(level, "%s %s %d in %.4f s, request %s%s", method[:16], path, status, seconds, request_id, about)
            REQUEST_ID.reset(token)


class ApiKeys:
    """Finds the tenant of a key; without tenants and key the service is open to all who reach it. Each key has one tenant."""

    def __init__(self, tenants: Iterable[TenantConfig], api_key: str | None = None) -> None:
        self._tenants: dict[str, str] = {} if api_key is None else {hash_key(api_key): ""}
        for tenant in tenants:
            if api_key is not None:
                remedy = "not beside [tenants.NAME] tables, which have keys of their own"
                raise errors.ConfigError("api_key", "what is given (not shown)", remedy)
            if tenant.name in self._tenants.values():
                raise errors.ConfigError("tenants", tenant.name, "each name once")
            for digest in tenant.api_key_sha256:
                if digest in self._tenants:
                    raise errors.ConfigError(f"tenants.{tenant.name}.api_key_sha256", digest, "a key of only one tenant")
                self._tenants[digest] = tenant.name

    @property
    def required(self) -> bool:
        """Whether the service asks for a key."""
        return bool(self._tenants)

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization` header, "" where there are none, None where the key is not known."""
        if not self._tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        return self._tenants.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None


class Guard:
    """Middleware: refuses by Host, key, Origin, path, framing and Content-Type, in this order, then bounds the body.

    - 421, without keys or with `allowed_hosts`: a Host that is not this service's. A web page whose name was pointed at this
      machine (DNS rebinding) is of the API's origin for a browser; only its Host distinguishes it from a page of ours.
    - 401, with keys: none that is known, on a path that is not in `PUBLIC_PATHS`. 403: a write from a page of another origin.
    - 400: a path with control characters; a body of a request that only reads, framed in two ways, compressed, or not called
      JSON, which a browser sends without asking first (of a form to `/v1/documents` only the Origin is checked).
    - 413: a body longer than `max_body_bytes` (documents) or `max_completion_bytes`. 408: one that does not come in `body_s`.
    - 429: unanswered bodies that are more than `BODIES_OF_TENANT` of the longest of one tenant, or `BODIES` of all.

    What is let through has `tenant` and `engine` in its state, and its body is in memory.
    """

    def __init__(
        self, app: ASGIApp, http: HttpConfig, keys: ApiKeys, engines: Mapping[str, Engine], body_s: float = BODY_S
    ) -> None:
        self._app, self._http, self._keys, self._engines, self._body_s = app, http, keys, engines, body_s
        named = frozenset(name.lower() for name in http.allowed_hosts)
        bound = http.host.lower() if re.fullmatch(HOST_NAME, http.host) else f"[{http.host.lower()}]"
        self._hosts = None if keys.required and not named else OWN_HOSTS | named | {bound}
        self._held = Counter[str]()  # bytes of bodies, by tenant
        self._returns_memory = False  # freed by large bodies, to the system, soon
        self._longest = max(http.max_body_bytes, http.max_completion_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers, counted = Headers(scope=scope), Counter[str]()
        has_body = headers.get("content-length", "0").strip() != "0" or "transfer-encoding" in headers
        try:
            self._check(scope, headers, has_body)
            if has_body:
                receive = _replay(await self._read(scope, headers, receive, counted), receive)
        except errors.CacheBlendError as error:
            await self._refuse(error, has_body, scope, receive, send)
        else:
            scope.setdefault("state", {})[ADMITTED] = True
            await self._app(scope, receive, send)
        finally:
            self._held -= counted
            if counted.total() > LARGE_BYTES and not self._returns_memory:
                self._returns_memory = True
                asyncio.get_running_loop().call_later(RETURN_AFTER_S, self._return_memory)

    def _check(self, scope: Scope, headers: Headers, has_body: bool) -> None:
        path, writes = scope["path"], scope["method"] not in READING
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        self._check_host(host)
        tenant = self._keys.tenant(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
        if tenant is not None:
            scope.setdefault("state", {}).update(tenant=tenant, engine=self._engines[tenant])
        elif path not in PUBLIC_PATHS or writes:
            message = "the API key is missing or not known; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        if writes and origin is not None:
            self._check_origin(origin, host)
        if NO_ID.search(path):
            message = "the path has a control character, or a byte that is no UTF-8; no document has such an id"
            raise ApiError(400, message, code="invalid_value")
        if has_body:
            self._check_framing(scope["method"], path, headers)

    @staticmethod
    def _check_framing(method: str, path: str, headers: Headers) -> None:
        if method in READING:
            raise ApiError(400, f"{method} requests have no body; leave it out", code="invalid_value")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "the body has a Content-Length and a Transfer-Encoding; send one of them", code="invalid_value")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(400, f"the body came with Content-Encoding {shortened(coding)}; send the JSON, or form, without one")
        sent = headers.get("content-type", "")
        kind = sent.partition(";")[0].strip().lower()
        is_form = path == "/v1/documents" and kind == "multipart/form-data"
        if not is_form and not re.fullmatch(r"application/([\w.-]+\+)?json", kind, re.ASCII):
            came = shortened(sent) if sent else "no Content-Type"
            raise ApiError(400, f"the body came with {came}; send JSON with Content-Type: application/json")

    def _check_host(self, host: str) -> None:
        named = re.fullmatch(rf"({HOST_NAME})\.?(:\d*)?", host)
        name = named[1].removesuffix(".") if named else ""
        # An address, which no name server can point elsewhere, is ours where all of the machine's are listened on.
        is_address = self._http.host in ANY_ADDRESS and re.fullmatch(r"[\d.]+|\[[^][]+\]", name)
        if self._hosts is None or name in self._hosts or is_address:
            return
        message = f"this service is not called {shortened(host)}; if it is, name that in allowed_hosts (--allowed-hosts)"
        raise ApiError(421, message, code="unknown_host")

    def _check_origin(self, origin: str, host: str) -> None:
        allowed = self._http.cors_origins
        if "*" in allowed or origin in allowed or (host and origin.partition("://")[2].lower() == host):
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
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    async def _read(self, scope: Scope, headers: Headers, receive: Receive, counted: Counter[str]) -> bytes:
        """The body, whose bytes are added to `counted`.

        Raises:
            ApiError: it is too long or late.
            errors.QueueFullError: all bodies together are too much.
        """
        name = "max_body_bytes" if scope["path"].startswith("/v1/documents") else "max_completion_bytes"
        max_bytes = getattr(self._http, name)
        why = f"the body is longer than {name}={max_bytes}; send less, or in parts"
        too_long = ApiError(413, why, code="body_too_long")
        if (declared := headers.get("content-length", "0")).isdigit() and int(declared) > max_bytes:
            raise too_long
        parts, read_bytes, more_body = list[bytes](), 0, True
        try:
            async with asyncio.timeout(self._body_s):
                while more_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise errors.ClientGoneError("the client has left")
                    more_body = message.get("more_body", False)
                    parts.append(message.get("body", b""))
                    read_bytes += len(parts[-1])
                    if read_bytes > max_bytes:
                        raise too_long
                    self._count(scope["state"]["tenant"], read_bytes, counted)
        except TimeoutError:
            why = f"the body did not come within {self._body_s:g} s; send it again"
            raise ApiError(408, why, code="body_timeout") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _count(self, tenant: str, read_bytes: int, counted: Counter[str]) -> None:
        """Count a body of which so many bytes have come, and of which `counted` are counted."""
        more = max(0, read_bytes - UNCOUNTED_BYTES) - counted[tenant]
        own_bytes, all_bytes = self._held[tenant] + more, self._held.total() + more
        if more and (own_bytes > BODIES_OF_TENANT * self._longest or all_bytes > BODIES * self._longest):
            raise errors.QueueFullError("unanswered requests have too many bytes of bodies together", RETRY_AFTER_S)
        self._held[tenant] += more
        counted[tenant] += more

    def _return_memory(self) -> None:
        self._returns_memory = False
        threading.Thread(target=return_freed_memory, daemon=True).start()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that has come as one message, which the application may drop, and what follows it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


class JsonRoute(APIRoute):
    """A route whose endpoint is called with `request`, its path's arguments, and the `body` that `read_json` read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint's call; FastAPI's own for an endpoint without a body."""
        if self.body_field is None:
            return super().get_route_handler()
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

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
    """Read a body and check it; an `ApiError` says what is no JSON, too much (`check_json`), or not allowed in a field."""
    if len(raw) > SMALL_BYTES:  # a smaller one is below the limits of `check_json`
        try:
            check_json(raw, "the body")
        except errors.InputError as error:
            raise ApiError(413, str(error), code="body_too_large") from None
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of a number with thousands of digits Python advises after a semicolon
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise ApiError(400, f"the body is not JSON: {why}") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None
