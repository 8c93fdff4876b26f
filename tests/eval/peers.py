"""A small OpenAI-compatible server, of whom tests know what it does when, and what it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from cacheblend.eval.load import LoadRequest

REQUEST = LoadRequest("Where?", ("Here is a place.", "There is another."))
USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 30}}}
Answer = Callable[[int, dict[str, Any]], Response]


def sse(*events: object) -> Response:
    """Events as a stream; a number is a pause in seconds, a text stands as it is."""

    async def stream() -> AsyncIterator[str]:
        for event in events:
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


def piece(content: str | None, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


@contextmanager
def peer(answer: Answer) -> Iterator[str]:
    """The address of a server that answers its n-th completion with `answer(n, body)`."""
    app, count = FastAPI(), iter(range(10**6))

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "peer-model"}]}

    @app.post("/v1/{path:path}")
    async def complete(path: str, request: Request) -> Response:
        body = await request.json()
        return answer(next(count), {**body, "path": path, "authorization": request.headers.get("authorization")})

    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        process = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off"))
        thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not process.started:
                time.sleep(0.001)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.should_exit = True
            thread.join()


def refuse(status: int) -> Response:
    return JSONResponse({"error": {"message": "no"}}, status)
