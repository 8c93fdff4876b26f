"""Bodies: what is large, deep or much of is refused soon, and nothing of it stops the event loop."""

import asyncio
import json
import socket
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import httpx
import hypothesis.strategies as st
import pytest
from api import MODEL, connected, listening, serving
from engines import QUESTION
from hypothesis import given
from pydantic import ValidationError
from starlette.types import Message
from waiting import wait_until

from cacheblend.base.errors import InputError
from cacheblend.service import Engine
from cacheblend.service.engine.document_sources import MAX_TEXT_BYTES, MAX_VALUES, PIECE_BYTES, check_json
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.documents import IngestBody
from cacheblend.service.http.guard import ApiError, ApiKeys, Guard, read_body
from cacheblend.service.http.schemas import ChatBody
from cacheblend.service.http.server import Server

JSON = {"Content-Type": "application/json"}
MIB = 2**20
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1}


def filled(begin: str, part: str, end: str, size: int = 30 * MIB) -> bytes:
    """A JSON text of about a size."""
    return f"{begin}{','.join([part] * (size // (len(part) + 1)))}{end}".encode()


LARGE: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: filled('{"documents": [', "1", "]}"),
    "lists": lambda: filled('{"documents": [', "[]", "]}"),
    "objects": lambda: filled('{"documents": [', "{}", "]}"),
    "texts": lambda: filled('{"documents": [', '""', "]}"),
    "fields": lambda: b'{"documents": [], ' + b",".join(b'"f%d": 1' % number for number in range(2_000_000)) + b"}",
    "one text": lambda: b'{"documents": [{"id": 7, "text": "' + b"x" * (30 * MIB) + b'"}]}',
    "one text of escapes": lambda: b'{"documents": [{"id": 7, "text": "' + rb"\"" * (15 * MIB) + b'"}]}',
    "one text of emoji": lambda: ('{"documents": [{"id": 7, "text": "' + "\U0001f600" * (7 * MIB) + '"}]}').encode(),
}


@pytest.mark.parametrize("name", list(LARGE))
def test_a_large_body_costs_little(name: str) -> None:
    """30 MiB of anything are refused with less than 200 MiB in use beside the body, whatever the JSON would become."""
    body = LARGE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError):
            read_body(body, IngestBody)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * MIB


@pytest.mark.parametrize("model", [IngestBody, ChatBody])
def test_one_error_of_many(model: type[IngestBody | ChatBody]) -> None:
    """Of a body with very many faults one is named, and no more than a few are looked for."""
    for body in (
        {"documents": [1] * 100_000},
        {"documents": [{}] * 90_000},
        {"messages": [1] * 100_000},
        {"messages": [{"role": "user", "content": [{"type": "image"}] * 20_000}]},
        {"messages": [{"role": "user", "content": "x", **{f"f{number}": 1 for number in range(50_000)}}]},
        {"response_format": {f"f{number}": 1 for number in range(50_000)}},
        {"logit_bias": {f"f{number}": "x" for number in range(50_000)}},
        {f"f{number}": 1 for number in range(50_000)},
    ):
        with pytest.raises(ValidationError) as found:
            model.model_validate(body)
        assert found.value.error_count() < 20
        with pytest.raises(ApiError) as refused:
            read_body(json.dumps(body).encode(), model)
        assert len(str(refused.value)) < 300


def test_values_are_counted_outside_of_texts() -> None:
    """Commas, brackets and escaped quotation marks in a text are no values; a body of few values is taken, however long."""
    check_json(json.dumps({"documents": [{"text": '\\",[{' * (MIB // 2)}] * 2}).encode(), "it")
    check_json(json.dumps({"documents": [{"id": str(number), "text": "x"} for number in range(20_000)]}).encode(), "it")
    check_json(b"[" + b"1," * (MAX_VALUES - 10) + b"1]", "it")
    for body in (
        b"[" + b"1," * MAX_VALUES + b"1]",
        b"[" * (MAX_VALUES + 1),
        b'["\\\\",' + b"[]," * MAX_VALUES,
        b'""' * MAX_VALUES * 2,
    ):
        with pytest.raises(InputError, match="it: more than 200000 values"):
            check_json(body, "it")


@given(st.text(alphabet='\\"[{,x', max_size=60), st.integers(1, 9))
def test_values_are_counted_wherever_a_piece_ends(text: str, piece_bytes: int) -> None:
    """Where a body is cut for counting makes no difference: an escape or a string may go over the border."""
    body = json.dumps({"a": [text, [text]]}).encode()
    # {, a, [, text, comma, [, text: seven, and a limit of six refuses them
    check_json(body, "it", 7, piece_bytes)
    with pytest.raises(InputError, match="more than 6 values"):
        check_json(body, "it", 6, piece_bytes)


def test_one_text_has_a_bound() -> None:
    """A text of more than eight MiB is refused before it is read, wherever it stands, with the advice to split it."""
    for begin, end in (('{"documents": [{"text": "', '"}]}'), ('{"id": "x", "text": "', ""), ('"', '"')):
        check_json(f"{begin}{'x' * MAX_TEXT_BYTES}{end}".encode(), "it")
        with pytest.raises(ApiError, match="split it into several documents") as refused:
            read_body(f"{begin}{'x' * (MAX_TEXT_BYTES + 1)}{end}".encode() + b" " * PIECE_BYTES, IngestBody)
        assert refused.value.status == 413


def test_bodies_together_have_a_bound(engine: Engine) -> None:
    """Bodies that have come in part count: the one that is too much is answered with 429, small ones always go through."""
    with serving(engine, max_body_bytes=MIB, max_completion_bytes=MIB) as (_, address), ExitStack() as stack:
        head = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        held = []
        for _ in range(2):
            connection = stack.enter_context(connected(address))
            connection.sendall(head % MIB + b" " * (MIB - 1))
            held.append(connection)
        until = time.monotonic() + 120
        body = b" " * (MIB - 1) + b"x"
        while (response := httpx.post(f"{address}/v1/documents", content=body, headers=JSON)).status_code != 429:
            assert time.monotonic() < until, response.text
        assert response.headers["Retry-After"] == "5"
        assert response.json()["error"]["code"] == "queue_full"
        assert httpx.post(f"{address}/v1/chat/completions", json=CHAT).status_code == 200
        for connection in held:
            connection.sendall(b"x")
            assert b" 400 " in connection.recv(2**16)  # no JSON: answered, and not counted any more
        while httpx.post(f"{address}/v1/documents", content=body, headers=JSON).status_code != 400:
            assert time.monotonic() < until


def test_a_body_that_does_not_come() -> None:
    """A body that goes on for longer than its time is answered with 408."""

    async def status() -> int:
        sent = list[Message]()
        ended = asyncio.Event()

        async def receive() -> Message:
            if not ended.is_set():
                await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": not ended.is_set()}

        async def send(message: Message) -> None:
            sent.append(message)
            ended.set()  # what is refused is read to its end

        async def app(*_: object) -> None:
            pytest.fail("the body is not there")

        guard = Guard(app, HttpConfig(), ApiKeys(()), {"": cast(Engine, None)}, body_s=0.2)
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"1000")]
        await guard({"type": "http", "path": "/v1/documents", "method": "POST", "headers": headers}, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(status()) == 408


def test_silent_and_slow_connections_give_way(engine: Engine) -> None:
    """Where all connections are silent, send their head or body slowly, or have no key, new clients are answered all the same.

    An answer that streams is not cut off for them.
    """
    head = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    key = b"Authorization: Bearer the-only-key\r\n\r\n"
    slow = (
        b"",
        b"GET /heal",
        b"GET /healthz HTTP/1.1\r\n" + head + b"\r\n",
        b"POST /v1/documents HTTP/1.1\r\n" + head + b"\r\n",
        b"POST /v1/documents HTTP/1.1\r\n" + head + key,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    http = HttpConfig(served_model_name=MODEL, api_key="the-only-key")
    with (
        Server(engine.config, http=http, engine=engine) as server,
        listening(server, connections=6) as address,
        ExitStack() as stack,
    ):
        headers = {"Authorization": "Bearer the-only-key"}
        body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True, "num_chunks": 0}
        streamed = stack.enter_context(
            httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers, timeout=60)
        )
        for begun in slow * 4:
            stack.enter_context(connected(address)).sendall(begun)
        wait_until(lambda: httpx.get(f"{address}/healthz").status_code == 200)  # what gave way has ended: until then 503
        assert [httpx.get(f"{address}/healthz").status_code for _ in range(3)] == [200] * 3
        assert httpx.post(f"{address}/v1/chat/completions", json=CHAT, headers=headers, timeout=60).status_code == 200
        assert streamed.status_code == 200
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"GET /healthz HTTP/1.1\r\nContent-Length: 2\r\n", "GET requests have no body"),
        (b"HEAD /metrics HTTP/1.1\r\nContent-Length: 2\r\n", ""),
        (b"GET /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", "GET requests have no body"),
        (b"POST /v1/documents HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n", "send one of them"),
    ],
)
def test_bodies_that_may_not_be(address: str, head: bytes, said: str) -> None:
    """A body of a request that only reads, or framed in two ways, is refused, and what follows it is not answered."""
    follows = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"2\r\n{}\r\n0\r\n\r\n" if b"chunked" in head else b"{}"
    with connected(address) as connection:
        connection.sendall(head + b"Host: localhost\r\nContent-Type: application/json\r\n\r\n" + body + follows)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert said in answer.decode()
    assert b"200 OK" not in answer


@pytest.mark.parametrize("waits", [False, True])
def test_a_refused_body_that_is_no_http(address: str, caplog: pytest.LogCaptureFixture, *, waits: bool) -> None:
    """After its refusal, or before it, a body that is no HTTP ends the connection, and logs no traceback."""
    head = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(address) as connection:
        connection.sendall(head + (b"2\r\n{}\r\n" if waits else b"no chunk\r\n\r\n"))
        answer = connection.recv(2**16)
        connection.sendall(b"no chunk\r\n\r\n" if waits else b"")
        answer += b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{address}/healthz").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_a_long_method_is_not_echoed(address: str) -> None:
    """An error message has no more of a method or path than a line."""
    for method, path in (("X" * 15_000, "/healthz"), ("GET", "/" + "x" * 15_000)):
        with connected(address) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert len(b"".join(iter(lambda: connection.recv(2**16), b""))) < 1000
