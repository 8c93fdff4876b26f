"""A small OpenAI-compatible server whose answers a test writes."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from api import listening
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse

from cacheblend.eval.load import LoadRequest

REQUEST = LoadRequest("Where?", ("Here is a place.", "There is another."))
USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 30}}}
Answer = Callable[[int], Response]


def sse(*events: object) -> Response:
    """Events as a stream; a number is a pause in seconds, a thread's event is waited for, a text stands as it is."""

    async def stream() -> AsyncIterator[str]:
        for event in events:
            if isinstance(event, threading.Event):
                await asyncio.to_thread(event.wait, 30)
            elif isinstance(event, float):
                await asyncio.sleep(event)
            else:
                yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


def piece(content: str | None, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]}


@contextmanager
def peer(answer: Answer) -> Iterator[str]:
    """The address of a server that answers its n-th completion with `answer(n)`."""
    app, count = FastAPI(), iter(range(10**6))

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "peer-model"}]}

    @app.post("/v1/chat/completions")
    async def complete() -> Response:
        return answer(next(count))

    with listening(app) as address:
        yield address


def refuse(status: int) -> Response:
    return JSONResponse({"error": {"message": "no"}}, status)
