"""The process that serves: uvicorn with its limits, and an end within the grace."""

from __future__ import annotations

import copy
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.config

from .app import create_app
from .config import LOOPBACK
from .server import Server

logger = logging.getLogger(__name__)
LAST_S = 1.0  # so long before the grace ends all that runs is given up, and so long after it the process ends in any case
KEEP_ALIVE_S = 5
MAX_CONNECTIONS = 500  # open at once; half of what the usual limit of open files (1024) allows
# The model's thread releases Python's lock at every operation, and has it again when its holder releases it. By default that
# is after 5 ms, hundreds of times a prompt, where another thread reads a long question or a large body.
SWITCH_S = 0.0001


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
            exit_at_once(sig)
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


def exit_by_finally(*_: object) -> None:
    """End the process by way of every `finally`, as uvicorn does not by itself; a further signal ends it at once.

    Raises:
        SystemExit: 0, a stop that was asked for is no failure.
    """
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, exit_at_once)
    raise SystemExit(0)


def exit_at_once(number: int, _: object = None) -> None:
    """End the process now, without closing anything: nothing that was acknowledged is lost by that."""
    os._exit(128 + number)


def run(server: Server, listener: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM: then nothing new is taken, and what runs has `grace_s` to end; see `stop_in_grace`.

    Args:
        server: what is served.
        listener: the bound socket to serve on; None binds one.
    """
    if server.http.host not in LOOPBACK and not server.keys.required:
        logger.warning(
            "the API is open to everybody who reaches %s; give it an --api-key, or [tenants.NAME] tables", server.http.host
        )
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal that stopped it again: without a handler the process would end before the store is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_by_finally)
    StoppableServer(uvicorn_config(server), server).run(sockets=None if listener is None else [listener])


def uvicorn_config(server: Server) -> uvicorn.Config:
    """How uvicorn serves the app."""
    return uvicorn.Config(
        create_app(server),
        host=server.http.host,
        port=server.http.port,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # `RequestLog` writes the same with the request's id, and without the ids of documents
        server_header=False,
        proxy_headers=False,  # nothing here goes by the client's address
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(server.scheduler.config.grace_s)),
    )


def log_config(level: int = logging.INFO) -> dict[str, Any]:
    """Uvicorn's configuration of logging, with the time of each line, for all loggers; `level` is that of this package's."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["default"]["fmt"] = "%(asctime)s %(levelprefix)s %(message)s"
    config["root"] = {"handlers": ["default"], "level": "WARNING"}
    config["loggers"]["cacheblend"] = {"level": level}
    return config
