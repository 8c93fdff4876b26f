"""A server listening on a free port of this machine, as users run it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from engines import wait_until

from cacheblend.service.http import Server
from cacheblend.service.http.run import MOST_CONNECTIONS, uvicorn_config

MODEL = "tiny"


@contextmanager
def listening(server: Server, most_connections: int = MOST_CONNECTIONS) -> Iterator[str]:
    """The address at which a server listens."""
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        process = uvicorn.Server(uvicorn_config(server, most_connections))
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: process.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.should_exit = True
            thread.join()
