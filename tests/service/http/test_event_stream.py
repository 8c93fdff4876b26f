"""No request outlives its client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import nullcontext

import pytest
from api import MODEL
from starlette.requests import ClientDisconnect
from starlette.types import Message
from waiting import wait_until

from cacheblend.service.http.generation import EventStream
from cacheblend.service.http.server import Server


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


def test_a_client_that_waits_for_a_whole_answer_and_leaves(address: str, server: Server) -> None:
    """A request that is not streamed ends soon after its client has left, also while it decodes a token at every step."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "while", "max_tokens": 500, "n": 4, "logit_bias": {"1": -100}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_until(lambda: server.scheduler.state.decoding > 0)
    wait_until(lambda: server.scheduler.state.decoding == 0)
    assert b'outcome="cancelled"} 1.0' in server.metrics.text()
