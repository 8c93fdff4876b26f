"""Connections that send nothing, too slowly, too much or no HTTP are ended, and shut nobody out."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from api import MODEL, listening

from cacheblend.service import Engine
from cacheblend.service.http import body as http_body
from cacheblend.service.http import run
from cacheblend.service.http.run import NoFilesFilter, raise_file_limit
from cacheblend.service.http.server import Server

SOON_S = 0.3
HEAD = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as open_one:
        yield open_one


def rest(open_one: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := open_one.recv(65536):
            parts.append(part)
    return b"".join(parts)


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    """The error of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"content-type: application/json" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_no_byte_and_half_a_head(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a byte is closed, one that drips its headers is answered with 408, and both in the head's time."""
    monkeypatch.setattr(run, "HEAD_S", SOON_S)
    with connected(address) as silent, connected(address) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(2):
            slow.sendall(b"X-Slow: 1\r\n")
            time.sleep(SOON_S / 4)
        assert rest(silent) == b""
        assert "headers" in error_in(rest(slow), 408)["message"]


def test_a_body_that_stalls(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of which nothing comes any more is answered with 408 and closed, and so is one that drips for too long."""
    monkeypatch.setattr(http_body, "STALL_S", SOON_S)
    with connected(address) as stalled:
        stalled.sendall(HEAD + b'Content-Length: 1000\r\n\r\n{"docu')
        assert error_in(rest(stalled), 408)["code"] == "body_timeout"
    monkeypatch.setattr(http_body, "STALL_S", 9.0)
    monkeypatch.setattr(http_body, "BODY_S", SOON_S)
    with connected(address) as slow:
        slow.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        for _ in range(3):
            slow.sendall(b" ")
            time.sleep(SOON_S / 5)
        assert error_in(rest(slow), 408)["code"] == "body_timeout"


def test_a_body_that_goes_on_behind_its_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client sends of a body that was refused is dropped for the head's time, and then the connection is closed."""
    monkeypatch.setattr(run, "HEAD_S", SOON_S)
    with connected(address) as refused:
        refused.sendall(HEAD + b"Content-Length: 999999999\r\n\r\n")
        assert refused.recv(65536).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                refused.sendall(b" ")
                time.sleep(SOON_S / 10)
            pytest.fail("it is still open")


def test_long_requests_have_their_time(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times for heads and bodies are no time for the answer, and a connection takes one request after the other."""
    for module, name in ((run, "HEAD_S"), (http_body, "STALL_S")):
        monkeypatch.setattr(module, name, SOON_S)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "What?"}], "max_tokens": 60, "top_k": 1}
    for _ in range(2):
        began = time.monotonic()
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for _ in response.iter_lines():
                time.sleep(0.005)
        assert response.status_code == 200
        assert time.monotonic() - began > SOON_S


def test_idle_connections_shut_nobody_out(engine: Engine) -> None:
    """More connections than there may be close those that are longest without a request; one with a request stays."""
    with Server(engine.config, engine=engine) as server, listening(server, 5) as address, ExitStack() as stack:
        asking = stack.enter_context(connected(address))
        asking.sendall(HEAD + b"Content-Length: 20\r\n\r\n")
        time.sleep(SOON_S)  # it is read
        idle = [stack.enter_context(connected(address)) for _ in range(30)]
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert rest(idle[0]) == b""
        asking.sendall(b'{"documents": [7]}  ')
        assert asking.recv(65536).startswith(b"HTTP/1.1 400")


def test_more_requests_than_connections(engine: Engine) -> None:
    """Where every connection has a request, a new one is told to come again."""
    with Server(engine.config, engine=engine) as server, listening(server, 3) as address, ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(connected(address))
            busy.sendall(HEAD + b"Content-Length: 20\r\n\r\n")
        time.sleep(SOON_S)
        with connected(address) as late:
            assert "connections" in error_in(rest(late), 503)["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["TLS", "no Host", "two Hosts", "a bad header", "a negative length", "two lengths"],
)
def test_what_is_no_http(address: str, sent: bytes) -> None:
    """What is no HTTP is refused in the API's own error shape."""
    with connected(address) as open_one:
        open_one.sendall(sent)
        assert "HTTP/1.1" in error_in(rest(open_one), 400)["message"]


def test_a_long_method_is_not_echoed(address: str) -> None:
    """An error message has no more of a method or path than a line."""
    for method, path in (("X" * 15_000, "/healthz"), ("GET", "/" + "x" * 15_000)):
        with connected(address) as open_one:
            open_one.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert len(rest(open_one)) < 1000


def test_no_files_are_left() -> None:
    """Asyncio's line about connections that it cannot take is logged once in a while, without a traceback; others always."""
    only_once = NoFilesFilter()

    def taken(message: str) -> tuple[bool, logging.LogRecord]:
        error = OSError(24, "Too many open files")
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), (OSError, error, None))
        return only_once.filter(record), record

    passed, record = taken("socket.accept() out of system resource\nsocket: <asyncio.TransportSocket>")
    assert (passed, record.exc_info) == (True, None)
    assert not taken("socket.accept() out of system resource")[0]
    assert taken("another error")[0]


def test_the_file_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit of open files goes up to what is enough, or to the hard one, and never down."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    for limits, expected in (((1024, 524288), 8192), ((256, 4096), 4096), ((65536, 65536), 65536)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert raise_file_limit() == expected
    assert set_to == [(8192, 524288), (4096, 4096)]
