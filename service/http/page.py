"""The web page at `/`: files of the package, held in memory, and headers that let them load nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page; it needs no key, what it asks for does."""
    for path, (name, media_type) in FILES.items():
        page = _Page((STATIC / name).read_bytes(), media_type)
        app.add_api_route(path, page, methods=["GET"], include_in_schema=False, response_class=Response)


class _Page:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type

    async def __call__(self) -> Response:
        return Response(self._content, headers=HEADERS, media_type=self._media_type)
