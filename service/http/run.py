"""The process that listens: connections with time-outs, and an end within the grace."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from http import HTTPStatus
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend.base.threads import in_own_thread

from .app import create_app
from .config import LOOPBACK
from .errors import ApiError, error_body
from .server import Server
from .starting import Starting

logger = logging.getLogger(__name__)
HEAD_S = 10.0  # from the connection, or its next request's first byte, to the end of the headers
LAST_S = 1.0  # so long before the grace ends all that runs is given up, and so long after it the process ends in any case
KEEP_ALIVE_S = 5
# The model's thread gives Python's lock back at every operation, and gets it again when whoever has it lets go. By default that
# is after 5 ms, hundreds of times a prompt, where another thread reads a long question or a large body.
SWITCH_S = 0.0001
BACKLOG = 128  # connections that wait to be taken; asyncio tries as many at once, and logs a line for each that it cannot take
MAX_FILES = 8192
MAX_CONNECTIONS = 1000
NO_FILES_EVERY_S = 10.0


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
        """Close a connection that has no request; one that has begun to send a head gets the reason."""
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


class StoppableServer(uvicorn.Server):
    """Tells the service at the first SIGTERM or SIGINT that it ends, not when the last connection is closed.

    Args:
        config: where to listen, and what to serve.
        server: the service.
    """

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self.should_exit:
            leave_at_once(sig)
        super().handle_exit(sig, frame)
        # In a thread: the signal may have interrupted somebody who holds one of the service's locks.
        threading.Thread(target=stop_in_grace, args=(self._server,), name="stopping", daemon=True).start()


def stop_in_grace(server: Server) -> None:
    """Take nothing new, give up uploads after half of the grace and requests before its end, and end the process after it.

    The thread that calls this ends with the process, which as a rule is before the end of the grace.
    """
    began, grace_s = time.monotonic(), server.scheduler.config.grace_s

    def sleep_until(after_s: float) -> None:
        time.sleep(max(0.0, began + after_s - time.monotonic()))

    server.stop()
    sleep_until(grace_s / 2)
    server.uploads.close(timeout_s=0)
    sleep_until(max(grace_s / 2, grace_s - LAST_S))
    server.give_up()
    sleep_until(grace_s + LAST_S)
    logger.warning("the service has not ended within grace_s=%g and is cut off; what it has acknowledged is on disk", grace_s)
    os._exit(0)  # threads that compute would abort an exit that waits for nobody


def leave(*_: object) -> None:
    """End the process by way of every `finally`, as uvicorn does not by itself; a further signal ends it at once.

    Raises:
        SystemExit: 0, a stop that was asked for is no failure.
    """
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, leave_at_once)
    raise SystemExit(0)


def leave_at_once(number: int, _: object = None) -> None:
    """End the process now, without closing anything: nothing that was acknowledged is lost by that."""
    os._exit(128 + number)


def run(server: Server, starting: Starting | None = None) -> None:
    """Serve until SIGINT or SIGTERM: then nothing new is taken, and what runs has `grace_s` to end; see `stop_in_grace`.

    Args:
        server: what is served.
        starting: whose sockets are taken over; None listens anew.
    """
    if server.http.host not in LOOPBACK and not server.keys.required:
        logger.warning(
            "the API is open to everybody who reaches %s; give it an --api-key, or [tenants.NAME] tables", server.http.host
        )
    logging.getLogger("asyncio").addFilter(NoFilesFilter())
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal that stopped it again: without a handler the process would end before the store is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    service = StoppableServer(uvicorn_config(server, min(MAX_CONNECTIONS, raise_file_limit() // 2)), server)
    if starting is None:
        service.run()
        return
    logger.info("warming up", extra={"stage": "warming up"})
    in_own_thread(server.warm_up)
    # What was loaded stays: a full collection over its half a million objects would hold Python's lock for a third of a second.
    gc.collect()
    gc.freeze()
    starting.stop()
    logger.info("ready: %s", starting.url)
    service.run(sockets=starting.sockets)


def uvicorn_config(server: Server, most_connections: int = MAX_CONNECTIONS) -> uvicorn.Config:
    """How uvicorn serves the app.

    Args:
        server: what is served.
        most_connections: open at once; see `TimedConnection`.
    """
    return uvicorn.Config(
        create_app(server),
        host=server.http.host,
        port=server.http.port,
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here goes by the client's address
        backlog=BACKLOG,
        limit_concurrency=most_connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(server.scheduler.config.grace_s)),
    )


def raise_file_limit() -> int:
    """Raise the soft limit of open files to `MAX_FILES`, or as far as the hard one goes; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else MAX_FILES


class NoFilesFilter(logging.Filter):
    """Lets asyncio's line about a connection that it cannot take through every `NO_FILES_EVERY_S`, without its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._last_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        now_s = time.monotonic()
        if now_s - self._last_s < NO_FILES_EVERY_S:
            return False
        self._last_s = now_s
        record.msg = "no connection can be taken: no file descriptors are left; raise the limit (ulimit -n, LimitNOFILE)"
        record.args, record.exc_info = (), None
        return True
