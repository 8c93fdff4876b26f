"""Bodies that are too long or too slow are refused before they are held in memory."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import HttpConfig
from .errors import ApiError, error_response

STALL_S = 20.0  # without a byte of a body
BODY_S = 300.0  # for the whole of it


class BodyLimit:
    """Middleware: a body that is longer than its route takes is answered with 413, one that does not come with 408.

    Documents may have `max_body_bytes`, everything else `max_completion_bytes`. A body is read whole, then the app begins.
    """

    def __init__(self, app: ASGIApp, http: HttpConfig) -> None:
        self._app, self._http = app, http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            response = error_response(error)
            if error.status == 408:
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

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client has gone.

        Raises:
            ApiError: 413 or 408.
        """
        name, most_bytes = self._limit(scope)
        too_long = ApiError(413, f"the body is longer than {name}={most_bytes}; send less, or in parts", code="body_too_long")
        if _told_bytes(scope) > most_bytes:
            raise too_long
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
                        raise too_long
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            why = f"the body did not come: {STALL_S:g} s without a byte, or {BODY_S:g} s in all; send it again"
            raise ApiError(408, why, code="body_timeout") from None

    def _limit(self, scope: Scope) -> tuple[str, int]:
        most_bytes, name = self._http.max_body_bytes, "max_body_bytes"
        if not scope["path"].startswith("/v1/documents") and self._http.max_completion_bytes < most_bytes:
            most_bytes, name = self._http.max_completion_bytes, "max_completion_bytes"
        return name, most_bytes


def _told_bytes(scope: Scope) -> int:
    """What `Content-Length` says; 0 where nothing does."""
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(told) if told.isdigit() else 0
