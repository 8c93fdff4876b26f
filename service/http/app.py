"""The ASGI app with the page and the small routes, and the process that serves it: uvicorn with its limits, until its end."""

import asyncio
import base64
import copy
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import numpy as np
import uvicorn
import uvicorn.config
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from cacheblend.base.errors import CacheBlendError
from cacheblend.base.threads import Check
from cacheblend.retriever import checked_between_batches
from cacheblend.retriever.splitter import CUT_CHARACTERS
from cacheblend.service.engine.config import METHODS
from cacheblend.service.engine.engine import Engine

from . import chat, documents, ingests, messages
from .config import LOOPBACK
from .guard import ADMITTED, PAGE_FILES, ApiError, Guard, JsonRoute, RequestLog, answer_error, refused
from .schemas import EmbeddingsBody
from .server import Server, run_call, run_document_call

logger = logging.getLogger(__name__)
LAST_S = 1.0  # so long before the grace ends all that runs is given up, and so long after it the process ends in any case
MAX_CONNECTIONS = 500  # open at once; half of what the usual limit of open files (1024) allows
# The model's thread releases Python's lock at every operation, and has it again when its holder releases it. By default that
# is after 5 ms, hundreds of times a prompt, where another thread reads a long question or a large body.
SWITCH_S = 0.0001
STATIC = Path(__file__).parent / "static"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter(route_class=JsonRoute)


def create_app(server: Server) -> FastAPI:
    """The ASGI app over a server, which its maker closes."""
    app = FastAPI(
        title="CacheBlend",
        summary="OpenAI-shaped API that answers over documents from their stored KV.",
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; `/openapi.json` describes the API
        redoc_url=None,
        redirect_slashes=False,  # the address to go to would be made of the request's Host
        dependencies=[Depends(HTTPBearer(auto_error=False))] if server.keys.required else [],
        responses={"default": {"description": 'An error: `{"type": "error", "error": {"message", "type", "param", "code"}}`.'}},
        exception_handlers={CacheBlendError: answer_error, RequestValidationError: answer_error, HTTPException: answer_error},
    )
    app.state.server = server
    for routes in (chat.router, messages.router, documents.router, ingests.router, router):
        app.include_router(routes)
    for path in PAGE_FILES:
        app.add_api_route(path, page_file, include_in_schema=False, response_class=Response)
    # The one that is added last is the first that a request meets.
    app.add_middleware(Guard, http=server.http, keys=server.keys, engines=server.engines)
    if server.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.http.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends headers of its own
            expose_headers=["X-Request-Id", "Retry-After", "Location"],
        )
    app.add_middleware(RequestLog, counter=server.metrics.errors)
    return app


async def page_file(request: Request) -> Response:
    """A file of the page."""
    return FileResponse(STATIC / PAGE_FILES[request.scope["path"]], headers=PAGE_HEADERS)


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
    embedder, texts = engine.retriever.embedder, body.input
    name = Path(embedder.name).name  # an embedder may be named by its folder
    server.check_model(body.model, name)
    if empty := [place for place, text in enumerate(texts) if not text.strip()]:
        raise refused(f"input.{empty[0]}", "is empty; leave it out")

    def embed(check: Check) -> Response:  # written out here too: many texts need long
        if body.dimensions not in (None, embedder.dimensions):
            raise refused("dimensions", f"{name} has {embedder.dimensions}; leave it out")
        with checked_between_batches(check):
            vectors_ND = np.asarray(embedder.encode(texts), dtype="<f4")
        starts = ((text, at) for text in texts for at in range(0, len(text), CUT_CHARACTERS))  # for a tokenizer's memory
        tokens = sum(len(engine.prompts.text_ids(text[at : at + CUT_CHARACTERS])) for text, at in starts)
        as_base64 = body.encoding_format == "base64"
        rows = [base64.b64encode(row_D).decode() for row_D in vectors_ND] if as_base64 else vectors_ND.tolist()
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    return await run_call(server.embeddings, request, embed)


@router.get("/v1/store")
async def store(request: Request) -> dict[str, Any]:
    """The tenant's store, prefix blocks and waiting chunks, and its answers' quality."""
    server: Server = request.app.state.server

    def read(engine: Engine) -> dict[str, Any]:
        return {
            "object": "store",
            **engine.store.stats().as_dict(),
            "documents": engine.retriever.count(),
            "chunks": engine.retriever.chunk_count,
            "precomputes_waiting": engine.background.waiting,
            "prefix": engine.prefixes.stats(),
            "quality": server.scheduler.quality(request.state.tenant),
        }

    return await run_document_call(request, read)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


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
    own = {"max_model_len": engine.fusor.max_positions, "methods": list(METHODS)}
    return {"id": server.model_name, "object": "model", "created": server.started, "owned_by": "cacheblend", **own}


class YieldingConnection(H11Protocol):
    """A connection that is closed for a new one while nothing is owed to its client: it is silent, still sends, or is refused.

    Those go first that had no key and no request that `Guard` let through, of them the oldest.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A client has connected; where there is no place for it, it has that of another."""
        super().connection_made(transport)
        self._came, self._standing = time.monotonic(), 0
        others = [one for one in self.connections if one != self and isinstance(one, YieldingConnection) and not one.is_owed]
        if others and len(self.connections) >= (self.limit_concurrency or MAX_CONNECTIONS):
            least = min(others, key=lambda one: (one.standing, one._came))
            least.transport.abort()
            self.connections.discard(least)  # now, and not when it has ended

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP: say so, unless an answer has begun already; one that follows is dropped."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        """An answer has ended; the request that comes next has no standing of its own yet."""
        self._standing = self.standing
        super().on_response_complete()

    @property
    def standing(self) -> int:
        """Up to 2, for a key and for a request that was let through, now or before."""
        return max(self._standing, (ADMITTED in self._state) + ("tenant" in self._state))

    @property
    def is_owed(self) -> bool:
        """Whether an answer is under way to a request that was let through."""
        return ADMITTED in self._state and not self.cycle.response_complete

    @property
    def _state(self) -> dict[str, Any]:
        return {} if self.cycle is None else self.cycle.scope["state"]


class StoppableServer(uvicorn.Server):
    """Tells the service at the first SIGTERM or SIGINT that it ends, not when the last connection is closed."""

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
    """Take nothing new, give up uploads after half of the grace and requests before its end, and end the process after it."""
    began, grace_s = time.monotonic(), server.scheduler.config.grace_s

    def wait_until(after_s: float) -> None:
        time.sleep(max(0.0, began + after_s - time.monotonic()))

    server.stop()
    wait_until(grace_s / 2)
    server.uploads.give_up()
    wait_until(grace_s - LAST_S)
    server.give_up()
    wait_until(grace_s + LAST_S)
    logger.warning("the service has not ended within grace_s=%g and is cut off; what it has acknowledged is on disk", grace_s)
    os._exit(0)  # threads that compute would abort an exit that waits for nobody


def exit_by_finally(*_: object) -> None:
    """End the process by way of every `finally`, as uvicorn does not by itself; a further signal ends it at once."""
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, exit_at_once)
    raise SystemExit(0)  # a stop that was asked for is no failure


def exit_at_once(number: int, _: object = None) -> None:
    """End the process now, without closing anything: nothing that was acknowledged is lost by that."""
    os._exit(128 + number)


def run(server: Server, listener: socket.socket | None = None) -> None:
    """Serve until SIGINT or SIGTERM, on a bound socket if one is given; then what runs has `grace_s` to end."""
    if server.http.host not in LOOPBACK and not server.keys.required:
        logger.warning("the API is open to all who reach %s; give it an --api-key, or [tenants.NAME] tables", server.http.host)
    for engine in server.engines.values():
        how = "the store %s has %d documents; a chat for which none is found is answered by the model itself"
        logger.info(how, engine.config.store_dir, engine.retriever.count())
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal that stopped it again: without a handler the process would end before the store is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_by_finally)
    StoppableServer(uvicorn_config(server), server).run(sockets=None if listener is None else [listener])


def uvicorn_config(server: Server) -> uvicorn.Config:
    """How uvicorn serves the app."""
    logging.getLogger("uvicorn.error").addFilter(_is_no_upgrade)
    return uvicorn.Config(
        create_app(server),
        host=server.http.host,
        port=server.http.port,
        http=YieldingConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # `RequestLog` writes the same with the request's id, and without the ids of documents
        server_header=False,
        proxy_headers=False,  # nothing here goes by the client's address
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=server.http.keep_alive_s,
        timeout_graceful_shutdown=max(1, int(server.scheduler.config.grace_s)),
    )


def _is_no_upgrade(record: logging.LogRecord) -> bool:
    """Whether a line is none of those about a request to upgrade, two for each, which need no key."""
    return not str(record.msg).startswith(("Unsupported upgrade", "No supported WebSocket"))


def log_config(level: int = logging.INFO) -> dict[str, Any]:
    """Uvicorn's configuration of logging, with the time of each line, for all loggers; `level` is that of this package's."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["formatters"]["default"]["fmt"] = "%(asctime)s %(levelprefix)s %(message)s"
    config["root"] = {"handlers": ["default"], "level": "WARNING"}
    config["loggers"]["cacheblend"] = {"level": level}
    return config
