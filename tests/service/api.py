"""A server listening on a free port of this machine, as users run it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from waiting import wait_until

from cacheblend.service.http.app import uvicorn_config
from cacheblend.service.http.server import Server

MODEL = "tiny"


@contextmanager
def listening(server: Server, on_loop: Callable[[], Coroutine[Any, Any, None]] | None = None) -> Iterator[str]:
    """The address at which a server listens; `on_loop` runs beside it on its event loop."""
    with contextlib.closing(socket.socket(proto=socket.IPPROTO_TCP)) as listener:  # as the command's
        listener.bind(("127.0.0.1", 0))
        process = uvicorn.Server(uvicorn_config(server))

        async def serve() -> None:
            beside = None if on_loop is None else asyncio.create_task(on_loop())
            await process.serve([listener])
            if beside is not None:
                beside.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            wait_until(lambda: process.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.should_exit = True
            thread.join()
