"""Errors in OpenAI's shape, naming the field at fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cacheblend.base.errors import (
    BudgetTooSmallError,
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

from .schemas import LIST_TAG, OBJECT_TAG, TEXT_TAG

logger = logging.getLogger(__name__)
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
MAX_SHOWN = 80
NO_ROOM = "there is no room: the disk or the store's budget is full; the service's log says which, under the request's id"
# OpenAI's fields that may have only their neutral value.
UNSUPPORTED = {
    "best_of": "1",
    "echo": "false",
    "suffix": "null",
}
# HTTP status and code of an error, by the first line that is of its kind.
KNOWN: tuple[tuple[type[Exception], int, str | None], ...] = (
    (QueueFullError, 429, "queue_full"),
    (ShuttingDownError, 503, None),
    (DeadlineError, 504, "deadline_exceeded"),
    (StoreFullError, 507, "store_full"),
    (DocumentChangedError, 409, "document_changed"),
    (ConfigError, 400, "invalid_value"),
    (PromptTooLongError, 400, "context_length_exceeded"),
    (InputError, 400, None),
)


class ApiError(CacheBlendError):
    """A request that the API itself refuses."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    return _status_and_code(error)[0]


def error_body(error: Exception) -> dict[str, Any]:
    """The body: `{"error": {"message", "type", "param", "code"}}`."""
    status = status_of(error)
    if isinstance(error, DamagedDocumentError):
        return _body(status, str(error), None, "document_damaged")
    if status == 500:
        return _body(500, "an error inside the service; its log has it under the request's id", None, "internal_error")
    if isinstance(error, ApiError):
        return _body(status, str(error), error.param, error.code)
    param = error.field if isinstance(error, ConfigError) else None
    has_path = isinstance(error, StoreFullError) and not isinstance(error, BudgetTooSmallError)
    message = NO_ROOM if has_path else str(error)
    return _body(status, message, param, _status_and_code(error)[1])


def _status_and_code(error: Exception) -> tuple[int, str | None]:
    return next(((status, code) for kind, status, code in KNOWN if isinstance(error, kind)), (500, None))


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install_error_handlers(app: FastAPI) -> None:
    """Have every error that is raised on purpose answered in this shape; `RequestLog` answers the others."""

    @app.exception_handler(CacheBlendError)
    async def _known(_: Request, error: CacheBlendError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(validation_error(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        method, path = request.method[:MAX_SHOWN], shortened(request.scope["path"])
        known = {404: f"there is no {method} {path}", 405: f"{method} is not for {path}"}
        response = error_response(ApiError(error.status_code, known.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response


# What pydantic finds, in words that say what to do; its own words where a kind is not here.
REMEDIES = {
    "missing": "is missing; give it",
    "extra_forbidden": "is no field of this request; leave it out",
    "literal_error": "must be {expected}",
    "none_required": "is not supported; leave it out",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a text",
    "string_unicode": "is not Unicode",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "string_pattern_mismatch": "must match {pattern}",
    "too_long": "is too long; at most {max_length}",
    "too_short": "is too short; at least {min_length}",
    "value_error": "{error}",
}
# What `REMEDIES` would say of these fields helps nobody.
FIELD_REMEDIES = {
    "prompt": "is one text, or a list of one; ask for several in several requests",
    "modalities": 'only ["text"] is supported; leave it out',
    "functions": "are OpenAI's older form of tools; leave them out, and give tools",
    "function_call": 'only "none" and "auto" are supported; leave it out',
    "audio": "this service answers only in text; leave it out",
    "web_search_options": "this service searches only its own documents; leave it out",
}


def validation_error(first: Mapping[str, Any]) -> ApiError:
    """The error of a field, from the first that pydantic found."""
    names = [part for part in first["loc"] if part not in ("body", "query", "path", TEXT_TAG, LIST_TAG, OBJECT_TAG)]
    place = [str(name)[:MAX_SHOWN].encode(errors="backslashreplace").decode() for name in names]  # a name may be no Unicode
    param = ".".join(place) or None
    given = "" if first["type"] == "missing" else f", got {shortened(first.get('input'))}"
    field = next((name for name in (*names[:1], *names[-1:]) if name in FIELD_REMEDIES), None)
    if param in UNSUPPORTED:
        what = f"only {UNSUPPORTED[param]} is supported; leave it out"
    elif field is not None and first["type"] not in ("missing", "value_error"):
        what = FIELD_REMEDIES[field]
    else:
        remedy = REMEDIES.get(first["type"])
        what = remedy.format_map(first.get("ctx", {})) if remedy else first["msg"]
    return ApiError(400, f"{param or 'the body'}: {what}{given}", param=param, code="invalid_value")


def error_response(error: Exception) -> JSONResponse:
    """The response to an error; what nobody foresaw is logged, and not sent."""
    status = status_of(error)
    if status >= 500 and not isinstance(error, ShuttingDownError | DeadlineError):
        logger.error("request %s met an error", REQUEST_ID.get(), exc_info=error)
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def shortened(value: object) -> str:
    """A client's text, in ASCII and at most `MAX_SHOWN` characters, for a message."""
    text = ascii(value[: 2 * MAX_SHOWN] if isinstance(value, str | bytes | list) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
