"""A listener for the time of the start: the port is taken at once, and every request is answered with what is being done."""

from __future__ import annotations

import html
import json
import logging
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from cacheblend.base.errors import ServiceError

logger = logging.getLogger(__name__)
CONNECTION_S = 5  # in which a connection has sent its request
LOG_EVERY_S = 10.0
STOP_S = 0.05  # how often the listening looks whether it is to stop


class Starting(logging.Handler):
    """Takes the port, and answers 503 with the stage that was logged last; a context manager, which closes the sockets.

    A stage is a record of this package's loggers with `extra={"stage": ...}`, which says it without paths.

    Args:
        host: address or name to listen on.
        port: 0 for any free one.

    Raises:
        ServiceError: it cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(logging.INFO)
        self.stage = "loading libraries"
        self._next_line = 0.0
        self.sockets = _listen(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.sockets[0].getsockname()[1]}"
        handler = type("Handler", (_Answer,), {"starting": self})
        self._servers = [_server(one, handler) for one in self.sockets]

    def emit(self, record: logging.LogRecord) -> None:
        """Note a stage."""
        self.stage = getattr(record, "stage", self.stage)

    def announce(self) -> None:
        """Log the address."""
        logger.info("listening on %s; the service is starting, and /readyz says how far it is", self.url)

    def note_progress(self, stage: str, done: int, total: int) -> None:
        """Note how far the packaged corpus is, in the log every `LOG_EVERY_S`."""
        self.stage = f"{stage} of the packaged corpus: {done} of {total}"
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LOG_EVERY_S
            logger.info("%s", self.stage)

    def stop(self) -> None:
        """Leave the sockets to the service: who connects from now on waits for it. A second call does nothing."""
        logging.getLogger("cacheblend").removeHandler(self)
        for server in self._servers:
            server.shutdown()
        self._servers = []

    def __enter__(self) -> Self:
        logging.getLogger("cacheblend").addHandler(self)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(STOP_S,), name="starting", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        for one in self.sockets:
            one.close()


def _listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of a host."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            # Of a socket of no named protocol asyncio does not switch off Nagle's algorithm: the first token would wait for the
            # client's acknowledgement of the headers, which takes 40 ms.
            one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]
            one.listen(128)
    except OSError as error:
        for one in sockets:
            one.close()
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ServiceError(f"{host}:{port} cannot be listened on ({why}); give another --port or --host") from None
    return sockets


def _server(listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    return server


class _Answer(BaseHTTPRequestHandler):
    """200 to `/healthz`, 503 to all else: to a browser as a page that asks again, else in the API's error shape."""

    starting: Starting
    timeout = CONNECTION_S

    def do_GET(self) -> None:
        """Answer."""
        message = f"the service is starting: {self.starting.stage}"
        status, kind = 503, "application/json"
        if self.path == "/healthz":
            status, body = 200, json.dumps({"status": "ok"})
        elif self.path == "/":
            kind = "text/html; charset=utf-8"
            body = f'<!doctype html><meta http-equiv="refresh" content="1"><title>CacheBlend</title><p>{html.escape(message)} …'
        else:
            error = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
            body = json.dumps({"error": error})
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a probe comes every second."""
