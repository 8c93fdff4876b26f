"""The ASGI app: the middleware around every request, the page, and the routes beside answers and documents."""

from __future__ import annotations

import base64
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer

from cacheblend.base.progress import Check
from cacheblend.retriever import checked_between_batches
from cacheblend.service.engine.config import read_examples
from cacheblend.service.engine.engine import Engine

from . import chat, documents
from .errors import ApiError, install_error_handlers
from .guard import PAGE_FILES, Guard, JsonRoute
from .metrics import RequestLog
from .schemas import EmbeddingsBody
from .server import Server, run_call, run_document_call

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter(route_class=JsonRoute)
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR_CONTENT: dict[str, Any] = {"application/json": {"schema": _ERROR}}


def create_app(server: Server) -> FastAPI:
    """The ASGI app over a server, which its maker closes."""
    bearer = HTTPBearer(auto_error=False, description="An API key, where the service has tenants.")
    app = FastAPI(
        title="CacheBlend",
        summary="OpenAI-shaped API that answers over documents from their stored KV.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; `/openapi.json` describes the API
        redoc_url=None,
        redirect_slashes=False,  # the address to go to would be made of the request's Host
        openapi_url="/openapi.json",
        dependencies=[Depends(bearer)] if server.keys.required else [],
        responses={"default": {"description": "An error in OpenAI's shape.", "content": _ERROR_CONTENT}},
    )
    app.state.server = server
    for routes in (chat.router, documents.router, router):
        app.include_router(routes)
    _add_page(app)
    install_error_handlers(app)
    # The one that is added last is the first that a request meets.
    app.add_middleware(Guard, http=server.http, keys=server.keys, engines=server.engines)
    if server.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.http.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends headers of its own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog, metrics=server.metrics)
    return app


def _add_page(app: FastAPI) -> None:
    """Serve the page's files, read once."""
    for path, name in PAGE_FILES.items():
        page = _Page((STATIC / name).read_bytes(), f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8")
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, response_class=Response)


class _Page:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type

    async def __call__(self) -> Response:
        return Response(self._content, headers=PAGE_HEADERS, media_type=self._media_type)


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
        chunks = max(1, min(chat.DEFAULT_NUM_CHUNKS, engine.retriever.chunk_count))
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
