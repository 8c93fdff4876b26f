"""The end of the process that listens: in its grace, whatever goes on, and at once where it is told twice."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

import uvicorn

from .server import Server

logger = logging.getLogger(__name__)
LAST_S = 1.0  # so long before the grace ends all that runs is given up, and so long after it the process ends in any case


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
