"""A connection that has its time: uvicorn's HTTP/1.1 protocol with time-outs for what comes before a request."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, error_body

HEAD_S = 10.0  # from the connection, or its next request's first byte, to the end of the headers


class TimedConnection(H11Protocol):
    """Closes what does not get on before a request is there; from then on `BodyLimit` and the app have their own times.

    A head that is not whole after `HEAD_S` is answered with 408. A connection without a byte is closed, and so is one that
    still sends the body of a request that was answered: uvicorn drops that, so that the client comes to see the answer. Where
    there are `limit_concurrency` connections, the one that is longest without a request is closed for the new one, so that
    idle ones shut nobody out; where all of them have requests, the new one is answered with 503. What is no HTTP is answered
    in the API's error shape.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin, with the time for the first head."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._expect_head()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            idle = [
                one for one in self.connections if isinstance(one, TimedConnection) and one is not self and not one.has_request
            ]
            if idle:
                min(idle, key=lambda one: one._idle_since).give_up()
            else:
                self._answer(503, "too many connections; try again later")

    def data_received(self, data: bytes) -> None:
        """Take bytes: of a head, a body, or what is left of a body that was answered already."""
        if self._head_timer is None and not self.has_request:
            self._expect_head()
        super().data_received(data)
        if self.has_request:
            self._head_is_there()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._head_is_there()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self) -> None:
        """Close a connection that has no request; one that has begun to send a head is told why."""
        if self.transport.is_closing() or self.has_request:
            return
        self.connections.discard(self)  # now, and not when the loop comes to it: it is not one of them any more
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._answer(408, "the request's headers did not come in time; send them again")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the API's error shape."""
        self._answer(400, "this is no HTTP/1.1 request: its request line, a header or its body's framing is wrong")

    def _answer(self, status: int, message: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = HTTPStatus(status).phrase.encode()
            body = json.dumps(error_body(ApiError(status, message))).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            head = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.connections.discard(self)
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.give_up)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
