"""The app: routes, who may call them, and what stands around every request."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

from . import completions, documents, operations, page
from .body_limit import BodyLimit
from .errors import ApiError, install_error_handlers
from .request_log import RequestLog
from .server import Server

OPEN_PATHS = ("/healthz", "/readyz", "/metrics")


def create_app(server: Server) -> FastAPI:
    """The ASGI app over a server, which its maker closes."""
    bearer = HTTPBearer(auto_error=False, description="An API key, where the service has tenants.")
    app = FastAPI(
        title="CacheBlend",
        summary="OpenAI-shaped API that answers over documents from their stored KV.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[Depends(bearer)] if server.keys.required else [],
        responses={"default": {"description": "An error in OpenAI's shape.", "content": _ERROR_CONTENT}},
    )
    app.state.server = server
    guarded = [Depends(find_tenant)]
    app.include_router(completions.router, dependencies=guarded)
    app.include_router(documents.router, dependencies=guarded)
    app.include_router(operations.router, dependencies=guarded)
    page.add_page(app)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, most_bytes=server.http.max_body_bytes)
    if server.http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.http.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog, metrics=server.metrics)
    return app


async def find_tenant(request: Request) -> None:
    """Find whose request it is, and with it the engine that answers.

    Raises:
        ApiError: 401, the key is missing or not known.
    """
    server: Server = request.app.state.server
    if request.url.path in OPEN_PATHS:
        return
    tenant = server.keys.tenant(request.headers.get("authorization"))
    if tenant is None:
        message = "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
        raise ApiError(401, message, code="invalid_api_key")
    request.state.tenant, request.state.engine = tenant, server.engines[tenant]


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
