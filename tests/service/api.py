"""A server listening on a free port of this machine, as users run it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from engines import CHUNK_TOKENS
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.base.options import from_options
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.http.app import uvicorn_config
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key
from cacheblend.service.http.server import Server
from cacheblend.service.serving.scheduler import ServingConfig

MODEL = "tiny"


@contextmanager
def listening(
    server: Any, on_loop: Callable[[], Coroutine[Any, Any, None]] | None = None, connections: int | None = None
) -> Iterator[str]:
    """The address at which a `Server` or another ASGI application listens; `on_loop` runs beside it on its event loop."""
    plain = {"log_config": None, "ws": "none", "lifespan": "off"}
    config = uvicorn_config(server) if isinstance(server, Server) else uvicorn.Config(server, **plain)
    config.limit_concurrency = connections or config.limit_concurrency
    with contextlib.closing(socket.socket(proto=socket.IPPROTO_TCP)) as listener:  # as the command's
        listener.bind(("127.0.0.1", 0))
        process = uvicorn.Server(config)

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


@contextmanager
def serving(engine: Engine, limits: ServingConfig | None = None, **http: Any) -> Iterator[tuple[Server, str]]:
    """A server over an engine, with options of the API, and its address."""
    config = HttpConfig(**{"served_model_name": MODEL, **http})
    with Server(engine.config, limits, config, engine=engine) as server, listening(server) as address:
        yield server, address


@contextmanager
def serving_tenants(
    names: Iterable[str],
    model_dir: Path,
    store_dir: Path,
    limits: ServingConfig | None = None,
    *,
    embedder: FakeEmbedder | None = None,
    stall_s: float = 60.0,
    **options: Any,
) -> Iterator[tuple[Server, str]]:
    """A server of tenants whose keys are `key_of`, with options of the engines, and its address."""
    settings = {"model": str(model_dir), "store_dir": store_dir, "chunk_tokens": CHUNK_TOKENS, "recompute_ratio": 0.15}
    config = from_options(EngineConfig, {**settings, **options})
    tenants = [TenantConfig(name=name, api_key_sha256=(hash_key(key_of(name)),)) for name in names]
    limits, http = limits or ServingConfig(guard_share=0.0), HttpConfig(served_model_name=MODEL)
    with (
        Server(config, limits, http, tenants, embedder=embedder or FakeEmbedder(), stall_s=stall_s) as server,
        listening(server) as address,
    ):
        yield server, address


def connected(address: str) -> socket.socket:
    """A connection to a server, for what no client would send."""
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def key_of(name: str) -> str:
    """A tenant's key."""
    return f"cb-key-of-{name}"


def bearer(name: str) -> dict[str, str]:
    """The header that says a tenant's key."""
    return {"Authorization": f"Bearer {key_of(name)}"}
