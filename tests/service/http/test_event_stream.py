"""A stream's request never outlives its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from cacheblend.service.http.completions import EventStream


class Served:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


async def one_event() -> AsyncIterator[str]:
    yield "data: {}\n\n"


@pytest.mark.parametrize("client_is_there", [True, False])
def test_cancelled_at_its_end(client_is_there: bool) -> None:
    """The response's end cancels the request: after the last event, and where the client is gone before the first one."""
    served = Served()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        if not client_is_there:
            raise OSError("the client is gone")

    stream = EventStream(one_event(), served)  # type: ignore[arg-type]  # a stand-in
    with nullcontext() if client_is_there else pytest.raises(ClientDisconnect):
        asyncio.run(stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    assert served.cancelled
