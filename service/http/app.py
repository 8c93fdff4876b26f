"""The ASGI app: routes, and the middleware around every request."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

from . import chat, documents, operations
from .errors import install_error_handlers
from .guard import Guard
from .metrics import RequestLog
from .page import add_page
from .server import Server


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
    for module in (chat, documents, operations):
        app.include_router(module.router)
    add_page(app)
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
