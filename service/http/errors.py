"""Errors in OpenAI's shape, naming the field at fault."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cacheblend.store.errors import (
    CacheBlendError,
    ConfigError,
    DamagedDocumentError,
    DeadlineError,
    DocumentChangedError,
    InputError,
    PromptTooLongError,
    QueueFullError,
    ShuttingDownError,
    StoreFullError,
)

logger = logging.getLogger(__name__)


class ApiError(CacheBlendError):
    """A request that the API itself refuses."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    known: tuple[tuple[type[Exception], int], ...] = (
        (QueueFullError, 429),
        (ShuttingDownError, 503),
        (DeadlineError, 504),
        (StoreFullError, 507),
        (DocumentChangedError, 409),
        (ConfigError, 400),
        (InputError, 400),
    )
    return next((status for kind, status in known if isinstance(error, kind)), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """The body: `{"error": {"message", "type", "param", "code"}}`."""
    status = status_of(error)
    if isinstance(error, DamagedDocumentError):
        return _body(status, str(error), None, "document_damaged")
    if status == 500:
        return _body(500, "an error inside the service; its log has it under the request's id", None, "internal_error")
    if isinstance(error, ApiError):
        return _body(status, str(error), error.param, error.code)
    if isinstance(error, ConfigError):
        return _body(status, str(error), error.field, "invalid_value")
    codes: tuple[tuple[type[Exception], str], ...] = (
        (PromptTooLongError, "context_length_exceeded"),
        (QueueFullError, "queue_full"),
        (DeadlineError, "deadline_exceeded"),
        (StoreFullError, "store_full"),
        (DocumentChangedError, "document_changed"),
    )
    return _body(status, str(error), None, next((code for kind, code in codes if isinstance(error, kind)), None))


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """Have every error that is raised on purpose answered in this shape; `RequestLog` answers the others."""

    @app.exception_handler(CacheBlendError)
    async def _known(_: Request, error: CacheBlendError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if isinstance(first.get("input"), bytes):  # it was not read as JSON
            sent = request.headers.get("content-type") or "no Content-Type"
            return error_response(ApiError(400, f"the body came with {_short(sent)}; send JSON with application/json"))
        names = [part for part in first["loc"] if part not in ("body", "query", "path")]
        place = [str(name).encode(errors="backslashreplace").decode() for name in names]  # a name may be no Unicode
        if first["type"] == "json_invalid":
            return error_response(ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}"))
        param = ".".join(place) or None
        given = "" if first["type"] == "missing" else f", got {_short(first.get('input'))}"
        return error_response(ApiError(400, f"{param or 'the body'}: {first['msg']}{given}", param=param, code="invalid_value"))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        known = {
            404: f"there is no {request.method} {request.url.path}",
            405: f"{request.method} is not for {request.url.path}",
        }
        message = known.get(error.status_code, str(error.detail))
        if error.status_code == 400 and error.__cause__ is not None:
            message = f"the body cannot be read as JSON: {_why_unreadable(error.__cause__)}"
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def error_response(error: Exception) -> JSONResponse:
    """The response to an error; what nobody foresaw is logged, and not told."""
    status = status_of(error)
    if status >= 500 and not isinstance(error, ShuttingDownError | DeadlineError):
        logger.error("a request met an error", exc_info=error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def _why_unreadable(cause: BaseException) -> str:
    if isinstance(cause, RecursionError):
        return "it is nested too deep"
    if isinstance(cause, UnicodeDecodeError):
        return f"it is not {cause.encoding} ({cause.reason} at byte {cause.start})"
    return str(cause).partition(";")[0]  # of a number with thousands of digits; behind it Python advises the server


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
