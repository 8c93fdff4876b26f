"""The web page at `/`: its files, which need no key. What the page asks for does."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SCRIPTS = ("page.js", "api.js", "answer.js", "documents.js")
FILES = {"/": "page.html", **{f"/{name}": name for name in ("page.css", *SCRIPTS)}}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page's files, read once."""
    for path, name in FILES.items():
        page = _Page((STATIC / name).read_bytes(), f"{MEDIA_TYPES[Path(name).suffix]}; charset=utf-8")
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, response_class=Response)


class _Page:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type

    async def __call__(self) -> Response:
        return Response(self._content, headers=HEADERS, media_type=self._media_type)
