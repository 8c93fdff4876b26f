"""What cannot be answered is refused in OpenAI's shape, with the field and the limit."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from api import MODEL, listening
from engines import DOCUMENTS, QUESTION
from waiting import wait_until

from cacheblend.base.errors import StoreFullError
from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.serving.config import ServingConfig
from cacheblend.service.serving.served_request import ServedRequest

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("change", "status", "param", "named"),
    [
        ({"model": "other"}, 404, "model", "tiny"),
        ({"model": 7}, 400, "model", "must be a text"),
        ({"messages": []}, 400, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.tool_call_id", "tool"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, None, "user's question"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, None, "messages[0].content is empty"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"max_tokens": "9"}, 400, "max_tokens", "whole number"),
        ({"max_tokens": 100_000}, 400, None, "512 positions"),
        ({"temperature": -1}, 400, "temperature", "at least 0"),
        ({"top_p": 0}, 400, "top_p", "above 0"),
        ({"stop": ["a"] * 9}, 400, "stop", "at most 4"),
        ({"method": "magic"}, 400, "method", "full_recompute"),
        ({"recompute_ratio": 2}, 400, "recompute_ratio", "at most 1"),
        ({"num_chunks": 9999}, 400, "num_chunks", "at most 1000"),
        ({"top_k": -2}, 400, "top_k", "at least -1"),
        ({"num_chunks": 2, "documents": [{"text": "x"}]}, 400, "num_chunks", "documents"),
        ({"documents": []}, 400, None, "documents is empty"),
        ({"documents": [{"text": "x"}] * 6}, 400, "documents", "max_documents=5"),
        ({"documents": [{"title": "x"}]}, 400, "documents.0.text", "is missing; give it"),
        ({"documents": [{"text": "word " * 600}]}, 400, None, "positions"),
        ({"cache_salt": "x" * 999}, 400, "cache_salt", "256"),
        ({"unknown": 1}, 400, "unknown", "leave it out"),
        ({"modalities": ["text", "audio"]}, 400, "modalities", 'only ["text"] is supported; leave it out'),
        ({"web_search_options": {}}, 400, "web_search_options", "searches its own documents alone"),
        ({"audio": {"voice": "x"}}, 400, "audio", "answers in text alone"),
        ({"functions": [{"name": "f"}]}, 400, "functions", "leave them out"),
        ({"function_call": {"name": "f"}}, 400, "function_call", 'only "none" and "auto"'),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
                ]
            },
            400,
            "messages.0.content.0",
            "image: this service reads text alone",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields(client: httpx.Client, change: dict[str, Any], status: int, param: str | None, named: str) -> None:
    """A field that cannot be used is named, with what is allowed, for whole answers and for streams."""
    for stream in (False, True):
        response = client.post("/v1/chat/completions", json={**CHAT, **change, "stream": stream})
        error = error_of(response)
        assert response.status_code == status, error
        assert (error["param"] or "").startswith(param or ""), error
        assert named in error["message"], error


@pytest.mark.parametrize(
    ("content", "status", "named"),
    [
        (b"{", 400, "not JSON"),
        (b"", 400, "the body"),
        (b"[1]", 400, "the body"),
        (b'{"model": "\xff\xfe"}', 400, ""),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, ""),
        (b'{"\\ud800": 1, "model": "tiny"}', 400, ""),
        (b"[" * 5000, 400, ""),
        (b'{"x": "' + b"x" * 20_000 + b'"}', 413, "max_body_bytes=20000"),
    ],
    ids=["cut off", "empty", "a list", "not UTF-8", "half a surrogate pair", "a name of half a pair", "deep", "too long"],
)
def test_bad_bodies(client: httpx.Client, content: bytes, status: int, named: str) -> None:
    """A body that is no JSON object of text is refused, on every route that takes one."""
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/documents"):
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, response.text
        assert named in error_of(response)["message"]


def test_a_long_body_in_pieces(client: httpx.Client) -> None:
    """A body whose length is not told is counted, and refused at the limit."""
    response = client.post(
        "/v1/documents", content=(b"x" * 1000 for _ in range(50)), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_long"


def test_unknown_paths(client: httpx.Client) -> None:
    """A path or method that there is not has the same shape."""
    for method, path, status in (("GET", "/v2", 404), ("DELETE", "/v1/models", 405), ("GET", "/../etc/passwd", 404)):
        response = client.request(method, path)
        assert response.status_code == status
        error_of(response)


def test_full_queue(engine: Engine) -> None:
    """A request too many is answered with 429 and the seconds to wait."""
    serving = ServingConfig(max_num_seqs=1, max_waiting=1, grace_s=0.0)
    with (
        Server(engine.config, serving, HttpConfig(served_model_name=MODEL), engine=engine) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        threads = [
            threading.Thread(target=client.post, args=("/v1/chat/completions",), kwargs={"json": {**CHAT, "max_tokens": 300}})
            for _ in range(2)
        ]
        for count, thread in enumerate(threads):
            thread.start()
            wait_until(lambda: server.scheduler.state.prefilling + server.scheduler.state.decoding == 1)
            if count:
                wait_until(lambda: server.scheduler.state.waiting == 1)
        response = client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 429, response.text
        assert int(response.headers["Retry-After"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        server.scheduler.close()
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        for thread in threads:
            thread.join()


def test_an_unforeseen_error_says_nothing_of_the_inside(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw is a 500 with a request id, without its text."""

    def fail(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(engine.store, "stats", fail)
    response = client.get("/v1/store", headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["code"] == "internal_error"
    assert response.headers["X-Request-Id"] == "mine-1"


def test_no_room_says_nothing_of_the_inside(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is a 507 without the folder, which the log has."""

    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("no room on the disk for /srv/tenants/acme/kv")

    monkeypatch.setattr(engine, "ingest", fail)
    response = client.post("/v1/documents", json={"documents": [{"id": "a", "text": "x"}]})
    assert response.status_code == 507
    assert error_of(response)["code"] == "store_full"
    assert "acme" not in response.text
    assert "/srv/tenants/acme/kv" in caplog.text


def test_disconnecting_cancels(client: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes away in the middle of a stream frees its place at once."""
    step = server.scheduler._step

    def slow_step(batch: list[ServedRequest]) -> None:
        time.sleep(0.02)  # so that the answer is far from its end when the client goes
        step(batch)

    monkeypatch.setattr(server.scheduler, "_step", slow_step)
    body = {**CHAT, "max_tokens": 380, "stream": True, "num_chunks": 1}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
        assert server.scheduler.state.decoding == 1
    wait_until(lambda: server.scheduler.state.decoding == 0)
    assert b'outcome="cancelled"} 1.0' in server.metrics.text()


def test_documents_of_the_wrong_kind(client: httpx.Client) -> None:
    """Documents that cannot be ingested are refused whole, and unknown ones are not found."""
    bad: list[tuple[object, str]] = [
        ([], "documents"),
        ([{"id": "a"}], "documents.0.text"),
        ([{"id": "a", "text": "  "}], "empty text"),
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], "different texts"),
        ([{"text": "x"}] * 6, "max_documents=5"),
    ]
    for documents, named in bad:
        response = client.post("/v1/documents", json={"documents": documents})
        assert response.status_code == 400
        assert named in error_of(response)["message"]
    assert len(client.get("/v1/documents").json()["data"]) == len(DOCUMENTS)
    for response in (
        client.get("/v1/documents/none"),
        client.delete("/v1/documents/none"),
        client.post("/v1/documents/none/pin", json={}),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "document_not_found"
