"""What operators and clients ask about the service itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse

from ..engine import Engine
from .errors import ApiError
from .server import Server

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model, in a list."""
    return {"object": "list", "data": [_model(request.app.state.server)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """The model, by name."""
    server: Server = request.app.state.server
    if name != server.model_name:
        raise ApiError(404, f"there is no model {name!r} here; use {server.model_name!r}", code="model_not_found")
    return _model(server)


@router.get("/v1/store")
async def store(request: Request) -> dict[str, Any]:
    """What the tenant's store and prefix blocks hold and have done since the service started, how many of its chunks wait to be
    computed in the background, and how good its answers are.
    """
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    stats = await run_in_threadpool(engine.store.stats)
    quality = server.scheduler.quality(request.state.tenant)
    prefix = engine.prefixes.stats()
    holes = engine.holes.waiting
    return {"object": "store", **stats.as_dict(), "holes": holes, "prefix": prefix.as_dict(), "quality": asdict(quality)}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> dict[str, str]:
    """Requests are served."""
    server: Server = request.app.state.server
    if not server.scheduler.is_alive:
        raise ApiError(503, "the service is stopping, or its scheduler has ended", code="not_ready")
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters in Prometheus' text format."""
    server: Server = request.app.state.server
    return Response(await run_in_threadpool(server.metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(server: Server) -> dict[str, Any]:
    engine = next(iter(server.engines.values()))
    return {
        "id": server.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "cacheblend",
        "max_model_len": engine.fusor.max_positions,
        "methods": list(engine.methods),
    }
