"""Requests that no client should send are refused with 4xx in OpenAI's shape, naming what is wrong; nothing of them stays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from api import MODEL, listening
from engines import DOCUMENTS, QUESTION

from cacheblend.base.errors import StoreFullError
from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.serving.config import ServingConfig

JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": QUESTION}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": QUESTION}
# A wrong value for each kind of field; JSON spells some that Python's parser takes all the same.
WRONG: dict[str, list[object]] = {
    "whole number": ["9", 1.5, -1, True, [], {}, math.nan, math.inf],
    "number": ["0.5", -0.1, True, [], {}, math.nan, -math.inf, 1e308, 10**400],
    "text": [7, True, [], {}, math.nan, "\ud800"],
    "flag": ["yes", 1, [], {}, math.nan],
    "list": ["x", 7, True, {}, [7], [None]],
}
FIELDS = {
    "whole number": ("max_tokens", "num_chunks"),
    "number": ("temperature", "top_p", "recompute_ratio"),
    "text": ("model", "method", "cache_salt"),
    "flag": ("stream", "return_chunks"),
    "list": ("documents", "messages"),
}
CASES = [(field, value) for kind, fields in FIELDS.items() for field in fields for value in WRONG[kind]]


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    """A client of a service with the limits that it has by default."""
    with (
        Server(engine.config, http=HttpConfig(served_model_name=MODEL), engine=engine) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client
        state = server.scheduler.state
        assert (state.waiting, state.prefilling, state.decoding) == (0, 0, 0)
        assert client.get("/readyz").status_code == 200
        assert len(client.get("/v1/documents").json()["data"]) == len(DOCUMENTS)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, whose status and shape are checked."""
    assert response.status_code == status, f"{response.status_code} {response.text[:300]}"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_wrong_values(client: httpx.Client) -> None:
    """Each field refuses what is not of its kind or range by its own name, in chats and texts, streamed or not."""
    for number, (field, value) in enumerate(CASES):
        path, body = ("/v1/chat/completions", CHAT) if number % 2 or field == "messages" else ("/v1/completions", TEXT)
        asked = {**body, "stream": number % 4 > 1, field: value}
        response = client.post(path, content=json.dumps(asked), headers=JSON)
        error = refused(response, 404 if field == "model" and response.status_code == 404 else 400)
        assert (error["param"] or "").startswith(field) or field in error["message"], f"{field}={value!r}: {error}"


@pytest.mark.parametrize(
    ("change", "status", "param", "named"),
    [
        ({"model": "other"}, 404, "model", "tiny"),
        ({"model": 7}, 400, "model", "must be a text"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"max_tokens": "9"}, 400, "max_tokens", "an integer"),
        ({"temperature": -1}, 400, "temperature", "at least 0"),
        ({"top_p": 0}, 400, "top_p", "above 0"),
        ({"stop": ["a"] * 9}, 400, "stop", "at most 4"),
        ({"method": "magic"}, 400, "method", "full_recompute"),
        ({"recompute_ratio": 2}, 400, "recompute_ratio", "at most 1"),
        ({"num_chunks": 9999}, 400, "num_chunks", "at most 1000"),
        ({"top_k": -2}, 400, "top_k", "at least -1"),
        ({"num_chunks": 2, "documents": [{"text": "x"}]}, 400, "num_chunks", "documents"),
        ({"documents": []}, 400, None, "documents is empty"),
        ({"documents": [{"text": "x"}] * 1001}, 400, "documents", "max_documents=1000"),
        ({"documents": [{"title": "x"}]}, 400, "documents.0.text", "is missing; give it"),
        ({"cache_salt": "x" * 999}, 400, "cache_salt", "256"),
        ({"unknown": 1}, 400, "unknown", "leave it out"),
        ({"modalities": ["text", "audio"]}, 400, "modalities", 'only ["text"] is supported; leave it out'),
        ({"web_search_options": {}}, 400, "web_search_options", "searches only its own documents"),
        ({"audio": {"voice": "x"}}, 400, "audio", "answers only in text"),
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
            "image: this service reads only text",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_fields(client: httpx.Client, change: dict[str, Any], status: int, param: str | None, named: str) -> None:
    """A field that cannot be used is named, with what is allowed, for whole answers and for streams."""
    for stream in (False, True):
        error = refused(client.post("/v1/chat/completions", json={**CHAT, **change, "stream": stream}), status)
        assert (error["param"] or "").startswith(param or ""), error
        assert named in error["message"], error


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages"),
        ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
        (
            [USER, {"role": "tool", "tool_call_id": "1", "content": "x"}],
            "messages[1]: the model's chat template takes no tools",
        ),
        ([{"role": "function", "content": "x"}], "messages.0.role"),
        ([{"role": "", "content": "x"}], "messages.0.role"),
        ([{"role": None, "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages[0].content is empty"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content"),
        ([USER, {"role": "system", "content": "x"}], "user's question"),
        ([USER, {"role": "assistant", "content": "x"}], "user's question"),
        ([{"role": "assistant", "content": ""}, USER], "messages[0].content is empty"),
        ([{**USER, "tool_calls": [{}]}], "messages.0.tool_calls.0.id: is missing"),
    ],
)
def test_wrong_messages(client: httpx.Client, messages: list[object], named: str) -> None:
    """Turns that cannot be answered are refused, and the message says which."""
    error = refused(client.post("/v1/chat/completions", json={**CHAT, "messages": messages}))
    assert named in error["message"]


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"Content-Type": "text/plain"}, b'{"model": "tiny"}'),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"model=tiny"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--"),
        ({"Content-Type": "application/xml"}, b"<model/>"),
        ({}, b'{"model": "tiny"}'),
        ({**JSON, "Content-Encoding": "gzip"}, b"\x1f\x8b\x08\x00"),
    ],
)
def test_wrong_content_types(client: httpx.Client, headers: dict[str, str], content: bytes) -> None:
    """A body that is not said to be JSON, or is none, is refused on every route that takes one."""
    for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/documents"), ("PUT", "/v1/documents/for")):
        message = refused(client.request(method, path, content=content, headers=headers))["message"]
        assert "JSON" in message or message.startswith("file: is missing"), message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"model": "\xff\xfe"}', "utf-8"),
        (b'{"model": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nest"),
        (b'{"model": "tiny", "model": NaN, "messages": []}', "model"),
        ("{'model': 'tiny'}".encode("utf-16"), "JSON"),
        (b"\x00", "JSON"),
        (b"null", "body"),
        (b'"text"', "body"),
        (b"[1]", "body"),
        (b"{", "not JSON"),
        (b"", "body"),
        (b'{"\\ud800": 1, "model": "tiny"}', ""),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_bodies_that_cannot_be_read(client: httpx.Client, content: bytes, named: str) -> None:
    """The error says why a body cannot be read."""
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/documents"):
        message = refused(client.post(path, content=content, headers=JSON))["message"]
        if path == "/v1/chat/completions":
            assert named in message, message


def test_too_much(client: httpx.Client) -> None:
    """A document of 50 MB, 10,000 documents, and prompts longer than the model's positions are refused with the limit."""
    long = {"documents": [{"id": "long", "text": "word " * 10_000_000}]}
    assert "max_body_bytes=33554432" in refused(client.post("/v1/documents", json=long), 413)["message"]
    long_chat = {**CHAT, "documents": long["documents"]}
    assert "max_completion_bytes=1048576" in refused(client.post("/v1/chat/completions", json=long_chat), 413)["message"]
    many = {"documents": [{"id": str(number), "text": f"number {number}"} for number in range(10_000)]}
    error = refused(client.post("/v1/documents", json=many))
    assert (error["param"], error["code"]) == ("documents", "too_many_documents")
    assert "max_documents=1000" in error["message"]
    assert "max_documents=1000" in refused(client.post("/v1/chat/completions", json={**CHAT, **many}))["message"]
    for body in (
        {**CHAT, "documents": [{"text": "word " * 2000}]},
        {**CHAT, "messages": [{"role": "user", "content": "word " * 2000}]},
        {**CHAT, "messages": [{"role": "system", "content": "word " * 2000}, USER]},
        {**CHAT, "max_tokens": 10**30},
        {**TEXT, "prompt": "word " * 2000},
    ):
        for stream in (False, True):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            error = refused(client.post(path, json={**body, "stream": stream}))
            assert error["code"] == "context_length_exceeded"
            assert "512 positions" in error["message"]


@pytest.mark.parametrize("id_", ["%00", "%ED%A0%80", "%ff", "a%0Ab", "%C2%9B2J", "a%1b%5d", "%7f"])
def test_ids_that_cannot_be(client: httpx.Client, id_: str) -> None:
    """An id with a control character, or made of bytes that are no UTF-8, is refused wherever one is named or given."""
    for method, path in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("POST", "/pin")):
        body = {"json": {"text": "x"}} if method == "PUT" else {"json": {}} if method == "POST" else {}
        assert "control character" in refused(client.request(method, f"/v1/documents/{id_}{path}", **body))["message"]
    document = {"id": unquote(id_), "text": "some words"}
    assert "control character" in refused(client.post("/v1/documents", json={"documents": [document]}))["message"]


@pytest.mark.parametrize("id_", ["..%2F..%2Fetc", "%2e%2e", "a" * 5000, "%F0%9F%98%80"])
def test_odd_ids(client: httpx.Client, id_: str) -> None:
    """An id is a name and never a path: an odd one is not found, or is taken and found again."""
    path = f"/v1/documents/{id_}"
    error = refused(client.get(path), 404)
    assert error["code"] in ("document_not_found", None)
    put = client.put(path, json={"text": "some words"})
    if put.status_code == 200:
        assert client.get(path).status_code == 200
        assert client.delete(path).status_code == 200
    else:
        assert put.status_code in (400, 404, 405), put.text


@pytest.mark.parametrize(
    "document",
    [
        {"text": ""},
        {"text": " \n"},
        {"text": None},
        {"text": 7},
        {"text": ["x"]},
        {"text": "\ud800"},
        {"id": "", "text": "x"},
        {"id": 7, "text": "x"},
        {"id": "\udfff", "text": "x"},
        {"id": "x", "title": {}, "text": "x"},
        {"id": "x", "title": "\ud800", "text": "x"},
        "x",
        None,
        [],
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_wrong_documents(client: httpx.Client, document: object) -> None:
    """A document that cannot be used is refused, whole calls at a time, and as a question's own."""
    good = {"id": "good", "text": "good words"}
    error = refused(client.post("/v1/documents", content=json.dumps({"documents": [good, document]}), headers=JSON))
    assert "document" in error["message"]
    own = {key: value for key, value in document.items() if key != "id"} if isinstance(document, dict) else document
    if own != {"text": "x"}:
        refused(client.post("/v1/chat/completions", content=json.dumps({**CHAT, "documents": [good, own]}), headers=JSON))


def test_documents_that_are_not_there(client: httpx.Client) -> None:
    """Unknown documents are not found; documents that contradict each other are refused together."""
    twice = {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}
    assert "different texts" in refused(client.post("/v1/documents", json=twice))["message"]
    for method, path, body in (("GET", "", None), ("DELETE", "", None), ("POST", "/pin", {})):
        error = refused(client.request(method, f"/v1/documents/none{path}", json=body), 404)
        assert error["code"] == "document_not_found"


def test_unknown_paths(client: httpx.Client) -> None:
    """A path or method that there is not has the same shape."""
    for method, path, status in (("GET", "/v2", 404), ("DELETE", "/v1/models", 405), ("GET", "/../etc/passwd", 404)):
        refused(client.request(method, path), status)


def test_full_queue(engine: Engine) -> None:
    """Of many requests at once, those beyond the queue are answered with 429 and the seconds to wait."""
    serving = ServingConfig(max_num_seqs=1, max_waiting=1, grace_s=0.0)
    with (
        Server(engine.config, serving, HttpConfig(served_model_name=MODEL), engine=engine) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(12) as others,
    ):
        asked = {**CHAT, "max_tokens": 100, "num_chunks": 0, "logit_bias": {"1": -100}}
        answers = list(others.map(lambda _: client.post("/v1/chat/completions", json=asked), range(12)))
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert refused(answer, 429)["code"] == "queue_full"
                assert int(answer.headers["Retry-After"]) >= 1
        server.scheduler.close()
        assert client.get("/readyz").status_code == 503
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503


def test_an_unforeseen_error_says_nothing_of_the_inside(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw is a 500 with a request id, without its text."""

    def fail(*_: object) -> None:
        raise RuntimeError("secret path")

    monkeypatch.setattr(engine.store, "stats", fail)
    response = client.get("/v1/store", headers={"X-Request-Id": "mine-1"})
    assert refused(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["X-Request-Id"] == "mine-1"


def test_no_room_says_nothing_of_the_inside(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk is a 507 without the folder, which the log has."""

    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("no room on the disk for /srv/tenants/acme/kv")

    monkeypatch.setattr(engine, "ingest", fail)
    response = client.post("/v1/documents", json={"documents": [{"id": "a", "text": "x"}]})
    assert refused(response, 507)["code"] == "store_full"
    assert "acme" not in response.text
    assert "/srv/tenants/acme/kv" in caplog.text
