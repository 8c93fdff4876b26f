"""The process that listens."""

from __future__ import annotations

import logging
import signal
import sys

import uvicorn

from .app import create_app
from .server import Server
from .stopping import StoppableServer, leave

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 5
# The model's thread gives Python's lock back at every operation, and gets it again when whoever has it lets go. By default that
# is after 5 ms, hundreds of times a prompt, where another thread reads a long question or a large body.
SWITCH_S = 0.0005


def run(server: Server) -> None:
    """Serve until SIGINT or SIGTERM: then nothing new is taken, and what runs has `grace_s` to end; see `stop_in_grace`."""
    config = uvicorn.Config(
        create_app(server),
        host=server.http.host,
        port=server.http.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(server.scheduler.config.grace_s)),
    )
    if server.http.host not in ("127.0.0.1", "::1", "localhost") and not server.keys.required:
        logger.warning("the API is open to everybody who reaches %s; give it [tenants.NAME] keys", server.http.host)
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal that stopped it once more: without a handler the process would end before the store is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    StoppableServer(config, server).run()
