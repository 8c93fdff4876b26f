"""JSON bodies: read and checked in a thread, with a bound on what a small text can become in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from .errors import ApiError, validation_error

MOST_VALUES = 200_000  # of one body: 2 bytes of JSON are up to 64 of Python's
_Model = TypeVar("_Model", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose body is read by `read_body` in a thread; FastAPI would read and check it on the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the body that was checked."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type), "a route takes one model as its body"
        assert issubclass(model, BaseModel), "a route takes one model as its body"

        async def read_and_handle(request: Request) -> Response:
            checked = await run_in_threadpool(read_body, await request.body(), model)
            return await handle(_CheckedRequest(request, checked))

        return read_and_handle


class _CheckedRequest(Request):
    """A request whose JSON is the checked model, which FastAPI takes as it is."""

    def __init__(self, request: Request, checked: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._checked = checked

    async def body(self) -> bytes:
        return b"{}"  # not empty, which would be no body

    async def json(self) -> Any:
        return self._checked


def read_body(raw: bytes, model: type[_Model]) -> _Model:
    """Read a body and check it.

    Raises:
        ApiError: 400: it is no JSON, has more than `MOST_VALUES` values, or a field is not allowed.
    """
    check_values(raw)
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except RecursionError:
        raise ApiError(400, "the body cannot be read as JSON: it is nested too deep") from None
    except UnicodeDecodeError as error:
        why = f"it is not {error.encoding} ({error.reason} at byte {error.start})"
        raise ApiError(400, f"the body cannot be read as JSON: {why}") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg}") from None
    except ValueError as error:  # a number with thousands of digits; behind the semicolon Python advises the server
        raise ApiError(400, f"the body cannot be read as JSON: {str(error).partition(';')[0]}") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)[0]) from None


def check_values(raw: bytes) -> None:
    """Refuse a body of more than `MOST_VALUES` values before it is read: strings, and what commas and brackets part.

    Raises:
        ApiError: so.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") + raw.count(b'"') <= MOST_VALUES:
        return  # as nearly always
    raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of quotation marks opens or closes a string
    values, opened, closed = 0, 0, -1
    while opened != -1 and values <= MOST_VALUES:
        opened = raw.find(b'"', closed + 1)
        structure = (closed + 1, len(raw) if opened == -1 else opened)
        values += 1 + sum(raw.count(mark, *structure) for mark in (b",", b"[", b"{"))
        closed = raw.find(b'"', opened + 1)
        if closed == -1:
            break  # it is no JSON
    if values > MOST_VALUES:
        raise ApiError(400, f"the body has more than {MOST_VALUES} values; send it in parts", code="too_many_values")
