"""Routes beside answers and documents: models, embeddings, the store, health and metrics."""

from __future__ import annotations

import base64
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from cacheblend.base.progress import Check
from cacheblend.retriever import checked_between_batches
from cacheblend.service.engine.config import read_examples
from cacheblend.service.engine.engine import Engine

from .body import JsonRoute
from .chat import DEFAULT_NUM_CHUNKS
from .errors import ApiError
from .schemas import EmbeddingsBody
from .server import Server, run_call, run_document_call

router = APIRouter(route_class=JsonRoute)


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


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Vectors of texts, by the embedder that the documents are searched with."""
    server: Server = request.app.state.server
    engine: Engine = request.state.engine
    embedder, texts = engine.retriever.embedder, body.texts()
    name = Path(embedder.name).name  # an embedder may be named by its folder
    server.check_model(body.model, name)
    if empty := [place for place, text in enumerate(texts) if not text.strip()]:
        raise ApiError(400, f"input.{empty[0]}: is empty; leave it out", param="input", code="invalid_value")

    def embed(check: Check) -> Response:  # written out here too: many texts need long
        if body.dimensions not in (None, dimensions := embedder.dimensions):
            raise ApiError(400, f"dimensions: {name} has {dimensions}; leave it out", param="dimensions", code="invalid_value")
        with checked_between_batches(check):
            vectors_ND = embedder.encode(texts)
        check()
        tokens = sum(len(engine.prompts.text_ids(text, with_bos=False)) for text in texts)
        as_base64 = body.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector_D.astype("<f4").tobytes()).decode() if as_base64 else vector_D.tolist(),
            }
            for index, vector_D in enumerate(np.asarray(vectors_ND, dtype=np.float32))
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    return await run_call(server.embeddings, request, embed)


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
    return Response(await server.metrics.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
