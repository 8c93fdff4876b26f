"""Requests that no client should send are refused with 4xx in OpenAI's shape, naming what is wrong; nothing of them stays."""

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from api import MODEL, serving
from engines import DOCUMENTS, QUESTION

from cacheblend.base.errors import (
    BudgetTooSmallError,
    DamagedDocumentError,
    DocumentChangedError,
    ShuttingDownError,
    StoreFullError,
)
from cacheblend.service import Engine
from cacheblend.service.serving.scheduler import ServingConfig

JSON = {"Content-Type": "application/json"}
CHATS, TEXTS, EMBEDDINGS, UPLOADS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/documents"
USER, SYSTEM = {"role": "user", "content": QUESTION}, {"role": "system", "content": "x"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": QUESTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
# Fields of a kind, and what is wrong in each; JSON spells some values that Python's parser takes all the same.
WRONG: dict[str, list[object]] = {
    "max_tokens num_chunks": ["9", 1.5, -2, True, [], {}, math.nan, math.inf],
    "temperature top_p recompute_ratio": ["0.5", -0.1, True, [], {}, math.nan, -math.inf, 1e308, 10**400],
    "model method cache_salt": [7, True, [], {}, math.nan, "\ud800"],
    "stream return_chunks": ["yes", 1, [], {}, math.nan],
    "documents messages": ["x", 7, True, {}, [7], [None]],
}
WRONG_VALUES = [(field, value) for fields, values in WRONG.items() for field in fields.split() for value in values]


def called(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema(value: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": value}}}


def nested(levels: int) -> Any:
    return json.loads('{"type": "array", "items": ' * levels + '{"type": "integer"}' + "}" * levels)


def messages(*turns: object) -> dict[str, Any]:
    return {"messages": [*turns]}


# A change of a chat that is right, and what the message begins with or has.
CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "use 'tiny'"),
    ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1"),
    ({"top_k": -2}, "top_k: must be greater than or equal to -1"),
    ({"stop": ["a" * 200] * 21}, "stop: has 4200 characters in all, more than 4096"),
    ({"stop": 7}, "stop: must be a text, or a list of them"),
    ({"method": "magic"}, "full_recompute"),
    ({"num_chunks": 2, "documents": [{"text": "x"}]}, "num_chunks: leave it out beside documents"),
    ({"documents": [{"text": "x"}] * 1001}, "max_documents=1000"),
    ({"documents": [{"title": "x"}]}, "documents.0.text: is missing; give it"),
    ({"cache_salt": "x" * 999}, "cache_salt: must have at most 256 characters"),
    ({"min_tokens": -1}, "min_tokens: must be greater than or equal to 0"),
    ({"top_logprobs": 2}, "top_logprobs: set logprobs to true with it"),
    ({"add_generation_prompt": False}, "add_generation_prompt: set continue_final_message to true with it"),
    ({"modalities": ["text", "audio"]}, 'modalities: only ["text"] is supported; leave it out'),
    ({"guided_choice": ["a"]}, "guided_choice: is not supported; give response_format"),
    ({"stop_token_ids": [1]}, "stop_token_ids: is not supported; give stop"),
    ({"tool_choice": {"type": "allowed_tools"}}, 'tool_choice.type: must be "function", or "allowed_tools"'),
    ({"functions": [{"name": "f"}]}, "functions: are OpenAI's older form of tools; leave them out, and give tools"),
    ({"function_call": {"name": "f"}}, "function_call: must be 'none' or 'auto'"),
    ({"n": 17}, "n: must be less than or equal to 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is no token id"),
    ({"logit_bias": {"999999": 1}}, "logit_bias: '999999' is no token id"),
    ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias: is too long"),
    ({"response_format": {"type": "xml"}}, "response_format.type: must be 'text', 'json_object' or 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format: give json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (schema({"type": "nothing"}), "cannot be enforced"),
    (schema({"$ref": "http://127.0.0.1:1/x.json"}), "cannot be enforced"),
    (schema(nested(40)), "levels deep"),
    (schema({"enum": ["x" * 70_000]}), "65536 characters"),
    ({"tools": [called("a b")]}, "tools.0.function.name: must match"),
    ({"tools": [called(), called()]}, "tools: two have the same name"),
    ({"tools": [called(description="x" * 70_000)]}, "tools: has more than 65536 characters"),
    ({"tools": [called(parameters={"a": nested(40)})]}, "tools: is more than 32 levels deep"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [called()], "tool_choice": "any"}, "tool_choice: must be 'none', 'auto' or 'required'"),
    ({"tool_choice": "required"}, "tool_choice: there are no tools"),
    (messages(), "messages: must have at least 1 item"),
    (messages({"role": "tool", "content": "x"}), "messages.0: tool_call_id: say with a tool's result"),
    (messages(USER, {"role": "tool", "tool_call_id": "1", "content": "x"}), "messages[1]: the model's chat template"),
    *((messages({"role": role, "content": "x"}), "messages.0.role: must be") for role in ("function", "")),
    *((messages({**role, "content": "x"}), "messages.0.role: is missing") for role in ({}, {"role": None})),
    (messages({"role": "user"}), "messages.0: content: is missing"),
    (messages({**USER, "images": ["x"]}), "messages.0.images: must have at most 0 items"),
    (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "messages.0.content.0.type: this service reads only text; leave the part out",
    ),
    ({**messages(SYSTEM), "documents": [{"text": "x"}]}, "messages: one must be the user's"),
    ({**messages(SYSTEM), "documents": [{"text": "x"}], "num_chunks": 3}, "num_chunks: leave it out beside documents"),
    (messages({**USER, "tool_calls": [{}]}), "messages.0.tool_calls.0.id: is missing"),
    (messages({**USER, "tool_calls": [CALL]}), "messages.0: tool_calls: are only the assistant's"),
    (
        messages({"role": "assistant", "tool_calls": [called(arguments=7) | {"id": "1"}]}, USER),
        "messages.0.tool_calls.0.function.arguments: must be the JSON of an object",
    ),
]
OTHER_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (TEXTS, {**TEXT, "prompt": 7}, "prompt: must be a text, or a list of them"),
    (TEXTS, {**TEXT, "prompt": []}, "prompt: must have at least 1 item"),
    (TEXTS, {**TEXT, "prompt": ["a", ""]}, "prompt is empty; give some text to continue"),
    (TEXTS, {**TEXT, "prompt": ["a"] * 33, "n": 2}, "prompt: 66 choices exceed max_waiting=64; ask for fewer"),
    (TEXTS, {**TEXT, "prompt": [5, -1]}, "prompt.0.1: must be greater than or equal to 0"),
    (TEXTS, {**TEXT, "prompt": [5, True]}, "prompt.0.1: must be a valid integer"),
    (TEXTS, {**TEXT, "prompt": [[5], [999_999]]}, "prompt: 999999 is no token id of this model"),
    (TEXTS, {**TEXT, "num_chunks": 2, "documents": [{"text": "x"}]}, "num_chunks: leave it out beside documents"),
    (TEXTS, {**TEXT, "best_of": 2}, "best_of: is no field of this request; leave it out"),
    (TEXTS, {**TEXT, "echo": True, "logprobs": 0}, "echo: log-probabilities of the prompt's tokens are not computed"),
    (TEXTS, {**TEXT, "suffix": "x"}, "suffix: is no field of this request; leave it out"),
    (EMBEDDINGS, {"input": []}, "input: must have at least 1 item"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "input: must have at most 2048 items"),
    (EMBEDDINGS, {"input": ["x", " "]}, "input.1: is empty"),
    (EMBEDDINGS, {"input": [[1, 2]]}, "check_embedding_ctx_length=False"),
    (EMBEDDINGS, {"input": [1, 2]}, "check_embedding_ctx_length=False"),
    (EMBEDDINGS, {"input": "x", "dimensions": 7}, "dimensions"),
    (EMBEDDINGS, {"input": "x", "model": "text-embedding-3-small"}, "use 'tiny'"),
    (EMBEDDINGS, {"input": "x", "normalize": False}, "normalize: must be True"),
    (EMBEDDINGS, {"input": "x", "encoding_format": "hex"}, "encoding_format: must be 'float' or 'base64'"),
    (UPLOADS, {"documents": 5}, "documents: must be a valid list"),
    (UPLOADS, {"documents": [{"id": "a", "text": "x"}, {"id": "a", "text": "y"}]}, "different texts"),
    (UPLOADS, {"documents": [{"id": "m", "text": "x", "meta": {}}]}, "documents.0.meta: is no field of this request"),
    (UPLOADS, {"documents": [{"id": "t", "title": "t" * 1001, "text": "x"}]}, "1000"),
]


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    """A client of a service with the limits that it has by default."""
    with serving(engine) as (server, address), httpx.Client(base_url=address, timeout=60) as client:
        yield client
        state = server.scheduler.state
        assert (state.waiting, state.prefilling, state.decoding) == (0, 0, 0)
        assert client.get("/readyz").status_code == 200
        assert len(client.get(UPLOADS).json()["data"]) == len(DOCUMENTS)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, whose status and shape are checked."""
    assert response.status_code == status, f"{response.status_code} {response.text[:300]}"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_wrong_values(client: httpx.Client) -> None:
    """Each field refuses what is not of its kind or range by its own name, in chats and texts, streamed or not."""
    for number, (field, value) in enumerate(WRONG_VALUES):
        path, body = (CHATS, CHAT) if number % 2 or field == "messages" else (TEXTS, TEXT)
        asked = {**body, "stream": number % 4 > 1, field: value}
        response = client.post(path, content=json.dumps(asked), headers=JSON)
        error = refused(response, 404 if field == "model" and response.status_code == 404 else 400)
        assert (error["param"] or "").startswith(field) or field in error["message"], f"{field}={value!r}: {error}"


def test_fields(client: httpx.Client) -> None:
    """A field that cannot be used is named, with what is allowed, for whole answers and for streams."""
    cases = [(CHATS, {**CHAT, "max_tokens": 1, **change}, named) for change, named in CHAT_FIELDS] + OTHER_FIELDS
    for path, body, named in cases:
        if named == "cannot be enforced" and find_spec("llguidance") is None:
            named = "needs the extra `structured`"
        for stream in (False, True) if path == CHATS else (None,):
            asked = body if stream is None else {**body, "stream": stream}
            error = refused(client.post(path, json=asked), 404 if "use 'tiny'" in named else 400)
            assert error["message"].startswith(named) if ": " in named else named in error["message"], (named, error)
            assert not error["param"] or error["param"] in error["message"] or error["param"] == "model"


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ({"Content-Type": "text/plain"}, b'{"model": "tiny"}'),
        ({"Content-Type": "text/plain; application/json"}, b'{"model": "tiny"}'),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"model=tiny"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--"),
        ({}, b'{"model": "tiny"}'),
        ({**JSON, "Content-Encoding": "gzip"}, b"{}"),
    ],
)
def test_wrong_content_types(client: httpx.Client, headers: dict[str, str], content: bytes) -> None:
    """A body that is not said to be JSON, as a page of anybody's may send it without asking first, or is none, is refused on
    every route that takes one, chunked or whole.
    """
    for path in (CHATS, UPLOADS):
        for sent in (content, iter([content])):
            message = refused(client.post(path, content=sent, headers=headers))["message"]
            assert "JSON" in message or message.startswith("file: is missing"), message


def test_kinds_of_json(client: httpx.Client) -> None:
    """JSON is JSON whatever its type's ending and its parameters."""
    for content_type in ("Application/JSON; charset=utf-8", "application/vnd.x+json"):
        content = json.dumps({**CHAT, "max_tokens": 1})
        assert client.post(CHATS, content=content, headers={"Content-Type": content_type}).status_code == 200


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
    for path in (CHATS, TEXTS, UPLOADS):
        message = refused(client.post(path, content=content, headers=JSON))["message"]
        assert named in message or path != CHATS, message


def test_too_much(client: httpx.Client) -> None:
    """A document of 50 MB, 10,000 documents, and prompts longer than the model's positions are refused with the limit."""
    long = {"documents": [{"id": "long", "text": "word " * 10_000_000}]}
    assert "max_body_bytes=33554432" in refused(client.post(UPLOADS, json=long), 413)["message"]
    assert "max_completion_bytes=8388608" in refused(client.post(CHATS, json={**CHAT, **long}), 413)["message"]
    chunked = client.post("/none", content=iter([b" " * 2**23, b" "]), headers=JSON)  # says no length before
    assert "max_completion_bytes=8388608" in refused(chunked, 413)["message"]
    many = {"documents": [{"id": str(number), "text": f"number {number}"} for number in range(10_000)]}
    for response in (client.post(UPLOADS, json=many), client.post(CHATS, json={**CHAT, **many})):
        error = refused(response)
        assert (error["param"], error["code"]) == ("documents", "too_many_documents")
        assert "max_documents=1000" in error["message"]
    system = {"role": "system", "content": "word " * 2000}
    by_characters, by_tokens = ({"messages": [{**system, "content": "word " * count}, USER]} for count in (2000, 400))
    for change, said in (
        ({"documents": [{"text": "word " * 2000}]}, ""),
        (by_characters, ""),
        (by_tokens, r"\(prompt is too long: \d+ tokens > 512 maximum\)"),
        ({"max_tokens": 10**30}, r"\(input length and `max_tokens` exceed context limit: \d+ \+ 10{30} > 512\)"),
    ):
        for stream in (False, True):
            error = refused(client.post(CHATS, json={**CHAT, **change, "stream": stream}))
            assert error["code"] == "context_length_exceeded"
            assert re.search(f"context length is 512 tokens.*{said}", error["message"])


@pytest.mark.parametrize("id_", ["%00", "%ED%A0%80", "%ff", "a%0Ab", "%C2%9B2J", "a%1b%5d", "%7f"])
def test_ids_that_cannot_be(client: httpx.Client, id_: str) -> None:
    """An id with a control character, or made of bytes that are no UTF-8, is refused wherever one is named or given."""
    for method in ("GET", "DELETE"):
        assert "control character" in refused(client.request(method, f"{UPLOADS}/{id_}"))["message"]
    document = {"id": unquote(id_), "text": "some words"}
    assert "control character" in refused(client.post(UPLOADS, json={"documents": [document]}))["message"]


@pytest.mark.parametrize("id_", ["..%2F..%2Fetc", "a" * 5000, "%F0%9F%98%80"])
def test_odd_ids(client: httpx.Client, id_: str) -> None:
    """An id is a name and never a path: an odd one is not found, or is taken and found again."""
    path = f"{UPLOADS}/{id_}"
    assert refused(client.get(path), 404)["code"] in ("document_not_found", None)
    document = {"id": unquote(id_), "text": "some words"}
    put = client.post(f"{UPLOADS}?wait=true", json={"documents": [document]})
    if put.status_code == 201:
        assert client.get(path).status_code == 200
        assert client.delete(path).status_code == 200
    else:
        assert put.status_code == 400, put.text


def test_wrong_documents(client: httpx.Client) -> None:
    """A document that cannot be used is refused, with its whole call, and as a question's own; an unknown one is not found."""
    good = {"id": "good", "text": "good words"}
    texts: list[object] = ["", " \n", None, 7, ["x"], "\ud800"]
    others: list[object] = [{"id": id_, "text": "x"} for id_ in ("", True, "\udfff")]
    others += [{"id": "x", "title": title, "text": "x"} for title in ({}, "\ud800")]
    for document in [*({"text": text} for text in texts), *others, "x", None, []]:
        error = refused(client.post(UPLOADS, content=json.dumps({"documents": [good, document]}), headers=JSON))
        assert "document" in error["message"]
        own = {key: value for key, value in document.items() if key != "id"} if isinstance(document, dict) else document
        if own not in ({"text": "x"}, {"text": ""}, {"text": " \n"}, "x"):
            refused(client.post(CHATS, content=json.dumps({**CHAT, "documents": [good, own]}), headers=JSON))
    for method in ("GET", "DELETE"):
        error = refused(client.request(method, f"{UPLOADS}/none"), 404)
        assert error["code"] == "document_not_found"


def test_unknown_paths(client: httpx.Client) -> None:
    """A path or method that there is not has the same shape; no redirect is made of a request's Host."""
    for path in ("/v2", "/../etc/passwd", "/v1/store/", "/healthz/"):
        refused(response := client.get(path), 404)
        assert "location" not in response.headers
    refused(client.delete("/v1/models"), 405)
    base = "the client's base URL is the service's address"
    for path, said in (
        ("/chat/completions", f"{base} with /v1, to"),
        ("/v1/v1/chat/completions", f"{base} with /v1, to"),
        ("/v1/v1/messages", f"{base} without /v1, to"),
        ("/v1/v1/messages/count_tokens", f"{base} without /v1, to"),
        ("/messages", f"{base} without /v1, to"),
        ("/v1/responses", "at /v1/chat/completions"),
    ):
        assert said in refused(client.post(path, json=CHAT), 404)["message"]
    for path in ("/health", "/", "/v1/models"):
        assert (client.head(path).status_code, client.head(path).content) == (200, b"")


def test_full_queue(engine: Engine) -> None:
    """Of many requests at once, those beyond the queue are answered with 429 and the seconds to wait."""
    with (
        serving(engine, ServingConfig(max_num_seqs=1, max_waiting=1, grace_s=0.0)) as (server, address),
        httpx.Client(base_url=address, timeout=60) as client,
        ThreadPoolExecutor(12) as others,
    ):
        asked = {**CHAT, "max_tokens": 100, "num_chunks": 0, "logit_bias": {"1": -100}}
        answers = list(others.map(lambda _: client.post(CHATS, json=asked), range(12)))
        assert {answer.status_code for answer in answers} == {200, 429}
        for answer in answers:
            if answer.status_code == 429:
                assert refused(answer, 429)["code"] == "queue_full"
                assert int(answer.headers["Retry-After"]) >= 1
        server.scheduler.close()
        responses = [client.get("/readyz"), client.get("/health"), client.post(CHATS, json=CHAT)]
        assert [response.status_code for response in responses] == [503] * 3


def test_errors_of_the_engine(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each has its status and says what to do; what nobody foresaw, and folders, are in the log, under the request's id."""
    for error, status, code, said in (
        (RuntimeError("secret"), 500, "internal_error", "request's id"),
        (StoreFullError("no room on the disk for /srv/secret/kv"), 507, "store_full", "there is no room"),
        (BudgetTooSmallError("it does not fit the store's byte budget"), 507, "store_full", "the store's byte budget"),
        (DocumentChangedError("a"), 409, "document_changed", "'a' was deleted or replaced"),
        (DamagedDocumentError("a"), 500, "document_damaged", "ingest it again"),
        (ShuttingDownError("the service is shutting down"), 503, None, "shutting down"),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(engine, "ingest", fail)
        caplog.clear()
        body = {"documents": [{"id": "a", "text": "x"}]}
        response = client.post(f"{UPLOADS}?wait=true", json=body, headers={"X-Request-Id": "mine-1"})
        found = refused(response, status)
        assert (found["code"], said in found["message"]) == (code, True)
        assert "secret" not in response.text
        assert response.headers["X-Request-Id"] == "mine-1"
        assert (str(error) in caplog.text and "mine-1" in caplog.text) is (status not in (409, 503))
