"""The web page at `/`: files of the package, and headers that let them load nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

STATIC = Path(__file__).parent / "static"
FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Serve the page; it needs no key, what it asks for does."""
    for path, name in FILES.items():
        app.add_api_route(path, _Page(STATIC / name), methods=["GET"], include_in_schema=False, response_class=FileResponse)


class _Page:
    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(self) -> FileResponse:
        return FileResponse(self._file, headers=HEADERS)
