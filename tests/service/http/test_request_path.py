"""The files that a request passes: the reading that a newcomer has before them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from api import MODEL
from engines import DOCUMENTS, QUESTION, OpenEngine
from starlette.types import ASGIApp, Message

import cacheblend.base
from cacheblend.service.http import HttpConfig, Server
from cacheblend.service.http.app import create_app

MAX_FILES = 58  # 56 or 57, by what background threads do meanwhile
TOP = Path(cacheblend.base.__file__).resolve().parents[1]
ROOMS = ("base", "blend", "loader", "retriever", "service", "store")
PATH = "/v1/chat/completions"


class FilesUsed:
    """Notes the project's files of which a function runs, in every thread that begins after `watching`."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes = set[str]()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all calls of this thread and of new ones."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # which takes it off

    @property
    def files(self) -> list[str]:
        """The files, below the project's folder."""
        paths = [Path(name).resolve() for name in self._codes if name.endswith(".py")]
        below = [path.relative_to(TOP) for path in paths if path.is_relative_to(TOP)]
        return sorted(path.as_posix() for path in below if path.parts[0] in ROOMS)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self._codes.add(frame.f_code.co_filename)


def test_files_from_body_to_first_token(open_engine: OpenEngine) -> None:
    """From a chat's arrival at the app to its first streamed token, functions of a bounded number of files run."""
    used = FilesUsed()
    with used.watching():
        engine = open_engine()
        engine.ingest(DOCUMENTS)
        with Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server:
            app = create_app(server)
            asyncio.run(ask(app, lambda _: None))
            engine.drain()
            asyncio.run(ask(app, lambda is_on: setattr(used, "is_on", is_on)))
    assert "service/engine/prefill.py" in used.files
    assert len(used.files) <= MAX_FILES, used.files


async def ask(app: ASGIApp, on_phase: Callable[[bool], None]) -> None:
    """Ask a question, streamed; says when it arrives, and when the first token leaves."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True, "max_tokens": 4, "num_chunks": 3}
    raw = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    scope |= {"query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
    pieces = list[bytes]()
    sent = asyncio.Event()

    async def receive() -> Message:
        if not sent.is_set():
            sent.set()
            return {"type": "http.request", "body": raw, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            on_phase(False)
            pieces.append(message["body"])

    on_phase(True)
    await app(scope, receive, send)
    assert b'"content"' in pieces[0]
