"""Requests that mark their chunks by documents or separators, as vLLM's server gets them; vLLM itself is not needed."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_random_model import CHAT_TEMPLATE, ModelShape, python_help, train_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from cacheblend.base.errors import InputError
from cacheblend.blend import ChunkContext
from cacheblend.integrations.vllm.config import ConnectorConfig
from cacheblend.integrations.vllm.router import CHAT, COMPLETIONS, DOCUMENTS, BlendRoutes, PromptMarker, WindowPrecomputes

DOCS = [
    {"title": "Travel", "text": "Trains are booked by the office. </s> A night away is paid. " * 6},
    {"text": "Lunch is at noon, and free on Fridays."},
]
QUESTION = {"role": "user", "content": "Who books trains?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = train_tokenizer(python_help()[:20], ModelShape(vocab=400, max_positions=2048))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def marker(tokenizer: Any, tmp_path: Path) -> PromptMarker:
    config = ConnectorConfig(store_dir=str(tmp_path), separator="<!chunk!>", chunk_tokens=64)
    return PromptMarker(tokenizer, config, 2048)


def chunk_texts(tokenizer: Any, marked: dict[str, Any], ids: list[int]) -> list[str]:
    return [tokenizer.decode(ids[start:stop]) for start, stop in marked["kv_transfer_params"]["cacheblend"]["chunks"]]


def test_a_chats_documents_stand_before_its_question(marker: PromptMarker, tokenizer: Any) -> None:
    """Documents become chunks, a long one several, before the question; each is marked, with the document that it is of."""
    marked = marker.mark(CHAT, {"messages": [QUESTION], "documents": DOCS, "max_tokens": 4})
    assert marked is not None
    params = marked["kv_transfer_params"]
    ids = params["prompt_token_ids"]
    texts = chunk_texts(tokenizer, marked, ids)
    assert len(texts) > 2
    assert "".join(text.removesuffix("\n\n") for text in texts[:-1]) == f"Travel\n{DOCS[0]['text']}"
    assert texts[-1] == f"{DOCS[1]['text']}\n\n"
    assert params["cacheblend"]["documents"] == [0] * (len(texts) - 1) + [1]
    assert tokenizer.eos_token_id not in ids  # of a document's text, nothing is a control token
    last = params["cacheblend"]["chunks"][-1][1]
    assert "Question: Who books trains?" in tokenizer.decode(ids[last:])
    assert "documents" not in marked
    assert marked["messages"] == [QUESTION]
    assert marked["max_tokens"] == 4


def test_the_last_messages_separators_part_its_chunks(marker: PromptMarker, tokenizer: Any) -> None:
    """What stands between two separators is a chunk, tokenised by itself; what stands before and after is as it was written."""
    content = "Read this.\n<!chunk!>First text. <!chunk!>\nSecond one.<!chunk!>What is second?"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": content}]}]
    marked = marker.mark(CHAT, {"messages": messages, "kv_transfer_params": {"cacheblend": {"ratio": 0.3}, "other": 1}})
    assert marked is not None
    params = marked["kv_transfer_params"]
    ids = params["prompt_token_ids"]
    assert chunk_texts(tokenizer, marked, ids) == ["First text.\n\n", "Second one.\n\n"]
    assert tokenizer.decode(ids[: params["cacheblend"]["chunks"][0][0]]).endswith("Read this.\n")
    assert "Be brief." in tokenizer.decode(ids)
    assert (params["cacheblend"]["ratio"], params["other"]) == (0.3, 1)


def test_a_texts_separators(marker: PromptMarker, tokenizer: Any) -> None:
    """A completion's prompt is sent on as token ids."""
    marked = marker.mark(COMPLETIONS, {"prompt": "Begin <!chunk!>One text.<!chunk!>Another.<!chunk!> and so", "max_tokens": 2})
    assert marked is not None
    assert chunk_texts(tokenizer, marked, marked["prompt"]) == ["One text.\n\n", "Another.\n\n"]
    assert marked["prompt"][0] == tokenizer.bos_token_id
    assert tokenizer.decode(marked["prompt"]).endswith(" and so")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [QUESTION]}),
        (CHAT, {"messages": [QUESTION], "documents": DOCS, "tools": [{"type": "function"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "documents": DOCS}),
        (CHAT, {"messages": "hi", "documents": DOCS}),
        (CHAT, {"messages": [QUESTION, {"role": "assistant", "content": "well,"}], "documents": DOCS}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": "no separator"}),
        (COMPLETIONS, {"prompt": "a<!chunk!>b<!chunk!>c", "echo": True}),
    ],
)
def test_what_is_vllms_as_it_is(marker: PromptMarker, path: str, body: dict[str, Any]) -> None:
    """Requests without chunks, and those whose rendering is vLLM's own business, go on as they came."""
    assert marker.mark(path, body) is None


@pytest.mark.parametrize("documents", [["text"], [{"title": "no text"}], [{"text": "  "}], 5, "text", {"text": "a text"}])
def test_bad_documents_are_refused(marker: PromptMarker, documents: Any) -> None:
    """Documents that are none are refused with a message."""
    with pytest.raises(InputError):
        marker.mark(CHAT, {"messages": [QUESTION], "documents": documents})


@pytest.fixture
def client(marker: PromptMarker) -> TestClient:
    """A server that answers with what it got, after the middleware."""

    async def echo(request: Request) -> JSONResponse:
        body = await request.body()
        assert int(request.headers["content-length"]) == len(body)
        return JSONResponse({"got": body.decode()})

    async def collective_rpc(method: str, args: Any) -> list[int]:
        calls.append((method, *args))
        return [[len(args[1]), 0]]

    calls: list[Any] = []
    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in (CHAT, COMPLETIONS, "/v1/other")])
    routes = BlendRoutes()
    routes.attach_router(app)
    client = TestClient(app)
    client.calls, client.routes = calls, routes  # type: ignore[attr-defined]  # for the tests below
    routes._marker, routes._engine = marker, SimpleNamespace(collective_rpc=collective_rpc)
    return client


def test_bodies_pass_the_middleware(client: TestClient) -> None:
    """A marked body is longer; one that is not a request, or is for another route, is the same to the byte; errors are 400."""
    marked = json.loads(client.post(CHAT, json={"messages": [QUESTION], "documents": DOCS}).json()["got"])
    assert marked["kv_transfer_params"]["prompt_token_ids"]
    for path, body in ((CHAT, b"{not json"), (CHAT, b"[1]"), ("/v1/other", json.dumps({"documents": DOCS}).encode())):
        assert client.post(path, content=body).json()["got"].encode() == body
    for documents in ([3], 5):
        refused = client.post(CHAT, json={"messages": [QUESTION], "documents": documents})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequestError")


def test_documents_are_stored_window_by_window(client: TestClient) -> None:
    """Each call to the workers has the chunks of one window of one document, and computes those that are new in it."""
    routes: Any = client.routes  # type: ignore[attr-defined]
    routes._precomputes = WindowPrecomputes((), ChunkContext(document_tokens=140), None)
    answer = client.post(DOCUMENTS, json={"documents": DOCS, "cache_salt": "tenant"})
    assert answer.json()["documents"] == 2
    assert answer.json()["stored_chunks"] == answer.json()["chunks"] > 2
    calls: Any = client.calls  # type: ignore[attr-defined]
    assert all(call[0] == "cacheblend_precompute" and call[3] == "tenant" for call in calls)
    sizes = [sum(map(len, window)) for _, (window,), _, _ in calls]
    assert len(sizes) > 3
    assert max(sizes) <= 140
    split = [[list(chunk) for chunk in routes._marker.split(document)] for document in DOCS]
    asked = [window[index] for _, (window,), new, _ in calls for index in new]
    assert asked == [chunk for chunks in split for chunk in chunks]
    # The chunks that a worker computes each after are the ones of the whole document.
    context = routes._precomputes.context
    before = [context.earlier(window)[index] for _, (window,), new, _ in calls for index in new]
    assert before == [tuple(earlier) for chunks in split for earlier in context.earlier(chunks)]
    assert client.post(DOCUMENTS, json={"documents": []}).status_code == 400


def test_what_the_disk_is_behind_with_is_asked_for_again(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that the workers leave, since too much waits to be written, are computed by a later call, and counted once."""
    monkeypatch.setattr("cacheblend.integrations.vllm.router.BUSY_S", 0)
    routes: Any = client.routes  # type: ignore[attr-defined]
    answers = [[0, 2], [1, 1], [1, 0]]

    async def collective_rpc(*_: Any, **__: Any) -> list[list[int]]:
        return [answers.pop(0)]

    routes._engine = SimpleNamespace(collective_rpc=collective_rpc)
    answer = client.post(DOCUMENTS, json={"documents": DOCS[1:]})
    assert (answer.json()["stored_chunks"], answers) == (2, [])


def test_a_document_that_is_too_long_is_refused_before_any_is_computed(client: TestClient) -> None:
    """A chunk that is beyond the model's positions, after what it is computed after, is the request's error."""
    routes: Any = client.routes  # type: ignore[attr-defined]
    routes._precomputes = WindowPrecomputes((1, 2), ChunkContext(filler_ids=(3,), document_tokens=10), 50)
    refused = client.post(DOCUMENTS, json={"documents": [DOCS[1], DOCS[0]]})
    assert (refused.status_code, "50 positions" in refused.json()["error"]["message"]) == (400, True)
    assert client.calls == []  # type: ignore[attr-defined]
    assert client.post(DOCUMENTS, json={"documents": DOCS[1:]}).status_code == 200


def test_the_docs_command(client: TestClient) -> None:
    """The `curl` command of docs/vllm.md stores its document, as curl sends it: without saying that it is JSON."""
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("curl ")]
    _, address, _, body = shlex.split(line, comments=True)
    assert address == f"localhost:8000{DOCUMENTS}"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = client.post(DOCUMENTS, content=body, headers=headers)
    assert (answer.status_code, answer.json()["documents"]) == (200, 1)


def test_without_the_connector_nothing_is_changed(client: TestClient) -> None:
    """A server that runs without the connector gets requests as they came, and stores no documents."""
    routes: Any = client.routes  # type: ignore[attr-defined]
    routes._marker = None
    body = json.dumps({"messages": [QUESTION], "documents": DOCS}).encode()
    assert client.post(CHAT, content=body).json()["got"].encode() == body
    assert client.post(DOCUMENTS, json={"documents": DOCS}).status_code == 503
    engine = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None))
    asyncio.run(routes.init_state(engine, None, None))
    assert routes._marker is None
