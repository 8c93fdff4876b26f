"""The service's log: lines of JSON, and one for each request. No library of the server is needed for the first line."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .observability import Metrics

logger = logging.getLogger(__name__)
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
HEADER = "x-request-id"


class RequestLog:
    """Middleware: gives each request an id, logs how it ended, counts errors, and answers those that nobody foresaw.

    The id is the caller's own `X-Request-Id`, where that is a plain word of at most 64 characters, or a new one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
        request_id = given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        started, status = time.perf_counter(), 0
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
            from .errors import error_response  # brings the server's libraries

            await error_response(error)(scope, receive, send_with_id)
        finally:
            if status >= 400:
                self._metrics.count_error(status)
            logger.info(
                "request",
                extra={
                    "fields": {
                        "method": scope["method"][:16],
                        "path": getattr(scope.get("route"), "path", None),  # the route's template, which has no ids
                        "status": status or None,  # None: the client went away before there was one
                        "seconds": round(time.perf_counter() - started, 4),
                    }
                },
            )
            REQUEST_ID.reset(token)


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


def log_json(level: int, stream: TextIO = sys.stderr) -> None:
    """Have everything that is logged written as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").disabled = True  # RequestLog writes the same, with the id
