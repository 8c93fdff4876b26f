"""Requests that no client should send are refused with 4xx in OpenAI's shape, naming what is wrong; nothing of them stays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from api import MODEL, listening
from engines import DOCUMENTS, QUESTION

from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server

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
    ],
    ids=["not UTF-8", "a number of 5000 digits", "100,000 deep", "a field twice", "UTF-16", "a zero byte", "null", "a text"],
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
