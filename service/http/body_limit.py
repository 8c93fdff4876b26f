"""Bodies that are too long are refused before they are held in memory."""

from __future__ import annotations

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_body

MOST_DROPPED_BYTES = 256 * 2**20


class BodyLimit:
    """Middleware: a body of more than `most_bytes` is answered with 413, told or counted.

    What the client still sends is read and dropped, up to `MOST_DROPPED_BYTES`: a connection that is closed on a client in the
    middle of its body loses the answer. A client that asks before it sends (`Expect: 100-continue`) is answered at once.
    """

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > self._most_bytes:
            if headers.get(b"expect", b"").lower() != b"100-continue" and int(told) <= MOST_DROPPED_BYTES:
                await self._drop(receive)
            await self._refuse(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._most_bytes:
                body.clear()
                if more:
                    await self._drop(receive)
                await self._refuse(scope, receive, send)
                return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _drop(self, receive: Receive) -> None:
        dropped = 0
        while dropped <= MOST_DROPPED_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than max_body_bytes={self._most_bytes}; send it in parts"
        error = ApiError(413, message, code="body_too_long")
        await JSONResponse(error_body(error), 413, {"Connection": "close"})(scope, receive, send)
