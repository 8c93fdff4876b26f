"""The process that listens."""

from __future__ import annotations

import logging
import math
import resource
import signal
import sys
import time

import uvicorn

from .app import create_app
from .connection import TimedConnection
from .server import Server
from .stopping import StoppableServer, leave

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 5
# The model's thread gives Python's lock back at every operation, and gets it again when whoever has it lets go. By default that
# is after 5 ms, hundreds of times a prompt, where another thread reads a long question or a large body.
SWITCH_S = 0.0001
BACKLOG = 128  # connections that wait to be taken; asyncio tries as many at once, and logs a line for each that it cannot take
MOST_FILES = 8192
MOST_CONNECTIONS = 1000
NO_FILES_EVERY_S = 10.0


def run(server: Server) -> None:
    """Serve until SIGINT or SIGTERM: then nothing new is taken, and what runs has `grace_s` to end; see `stop_in_grace`."""
    if server.http.host not in ("127.0.0.1", "::1", "localhost") and not server.keys.required:
        logger.warning("the API is open to everybody who reaches %s; give it [tenants.NAME] keys", server.http.host)
    logging.getLogger("asyncio").addFilter(NoFilesFilter())
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal that stopped it once more: without a handler the process would end before the store is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    StoppableServer(uvicorn_config(server, min(MOST_CONNECTIONS, raise_file_limit() // 2)), server).run()


def uvicorn_config(server: Server, most_connections: int = MOST_CONNECTIONS) -> uvicorn.Config:
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
    """Raise the soft limit of open files to `MOST_FILES`, or as far as the hard one goes; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else MOST_FILES


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
