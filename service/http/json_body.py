"""JSON bodies: read and checked in a thread, with bounds on what a small body can become in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from .errors import ApiError, validation_error

MOST_VALUES = 200_000  # of one body: 2 bytes of JSON are up to 64 of Python's
MOST_TEXT_BYTES = 8 * 2**20  # of one string as it is sent; a call on a string holds Python's lock for all of it
SMALL_BYTES = 2**14  # read in less time than a thread takes to begin
PIECE_BYTES = 2**16  # checked at once, and then other threads have their turn
_Model = TypeVar("_Model", bound=BaseModel)


class JsonRoute(APIRoute):
    """A route whose body is read by `read_body` in a thread; FastAPI would read and check it on the event loop.

    Large bodies of one tenant are read one after the other, so that it takes one thread's part of Python's lock.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given the body that was checked."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = self.body_field.field_info.annotation
        assert isinstance(model, type), "a route takes one model as its body"
        assert issubclass(model, BaseModel), "a route takes one model as its body"

        async def read_and_handle(request: Request) -> Response:
            raw = b"".join([part async for part in request.stream()])  # `request.body` would hold it until the answer
            if len(raw) <= SMALL_BYTES:
                checked = read_body(raw, model)
            else:
                async with request.app.state.server.reading[request.state.tenant]:
                    checked = await asyncio.to_thread(read_body, raw, model)
            del raw
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
        ApiError: 400, it is no JSON, or a field is not allowed; see `check_values` too.
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
    """Refuse a body of too many values (strings, and what commas and brackets part) or with too long a string, unread.

    Raises:
        ApiError: 400, more than `MOST_VALUES` values; 413, a string of more than `MOST_TEXT_BYTES`.
    """
    values = text_bytes = start = 0
    in_text = False
    while start < len(raw):
        piece = raw[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # its last backslash escapes the byte behind it
            piece = raw[start : start + len(piece) + 1]
        start += len(piece)
        # What is left of quotation marks opens or closes a string.
        for number, part in enumerate(piece.replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')):
            if number:
                in_text, text_bytes = not in_text, 0
                values += in_text
            if in_text:
                text_bytes += len(part)
            else:
                values += part.count(b",") + part.count(b"[") + part.count(b"{")
            if text_bytes > MOST_TEXT_BYTES:
                why = f"the body has a text of more than {MOST_TEXT_BYTES} bytes; split it into several documents"
                raise ApiError(413, why, code="text_too_long")
        if values > MOST_VALUES:
            raise ApiError(400, f"the body has more than {MOST_VALUES} values; send it in parts", code="too_many_values")
