"""Bodies read as JSON and checked, in a thread where they are large."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from cacheblend.base.errors import InputError
from cacheblend.service.engine.json_lines import check_values

from .errors import ApiError, validation_error

SMALL_BYTES = 2**14  # read in less time than a thread needs to begin
_Model = TypeVar("_Model", bound=BaseModel)


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
