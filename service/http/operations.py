"""Calls of operators and clients about the service itself."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from cacheblend.service.engine.config import read_examples
from cacheblend.service.engine.engine import Engine

from .completions import DEFAULT_NUM_CHUNKS
from .errors import ApiError
from .server import Server, run_call, run_document_call

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model, in a list."""
    return {"object": "list", "data": [_model(request.app.state.server)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """The model, by name."""
    server: Server = request.app.state.server
    server.check_model(name)
    return _model(server)


@router.get("/v1/store")
async def store(request: Request) -> dict[str, Any]:
    """What the tenant's store and prefix blocks hold and have done since the service started, how many of its chunks wait to be
    computed in the background, how good its answers are, what each recompute ratio is predicted to cost and lose,
    and questions to begin with.
    """
    server: Server = request.app.state.server
    tenant = request.state.tenant

    def read(engine: Engine) -> dict[str, Any]:
        chunks = max(1, min(DEFAULT_NUM_CHUNKS, engine.retriever.chunk_count))
        stats, prefix, quality = engine.store.stats(), engine.prefixes.stats(), server.scheduler.quality(tenant)
        return {
            **stats.as_dict(),
            "precomputes_waiting": engine.background.waiting,
            "prefix": prefix.as_dict(),
            "quality": quality,
            "prediction": engine.predict(chunks).as_dict(),
            "examples": read_examples(Path(engine.config.store_dir)),
        }

    return {"object": "store", **await run_document_call(request, read)}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The package's version."""
    return {"version": metadata.version("cacheblend")}


@router.get("/health")
@router.get("/readyz")
async def readyz(request: Request) -> dict[str, str]:
    """Requests are served, and get on."""
    server: Server = request.app.state.server
    if why := server.not_ready:
        raise ApiError(503, why, code="not_ready")
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters in Prometheus' text format."""
    server: Server = request.app.state.server
    text = await run_call(server.scrapes, request, lambda _: server.metrics.text())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(server: Server) -> dict[str, Any]:
    engine = next(iter(server.engines.values()))
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "cacheblend",
        "max_model_len": engine.fusor.max_positions,
        "methods": list(engine.methods),
    }
