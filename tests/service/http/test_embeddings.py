"""Embeddings over the API, and what other clients probe a service with."""

from __future__ import annotations

import threading
from importlib import metadata

import httpx
import numpy as np
import openai
import pytest
from api import MODEL
from engines import QUESTION
from waiting import wait_until

from cacheblend.service import Engine
from cacheblend.service.http.server import MAX_DOCUMENT_CALLS, Server

TEXTS = [QUESTION, "Another text, of other words.", "  注意力机制 and naïve café 🙂 "]


def test_embeddings(engine: Engine, openai_client: openai.OpenAI) -> None:
    """OpenAI's client gets the embedder's very vectors, as floats and in the base64 that it asks for by itself."""
    expected = engine.retriever.embedder.encode(TEXTS)
    name = engine.retriever.embedder.name
    for options in ({"model": name}, {"model": MODEL, "encoding_format": "float"}, {"model": name, "dimensions": 384}):
        if "dimensions" in options:
            options["dimensions"] = engine.retriever.embedder.dimensions
        answer = openai_client.embeddings.create(input=TEXTS, **options)
        assert [one.index for one in answer.data] == [0, 1, 2]
        np.testing.assert_allclose(np.array([one.embedding for one in answer.data]), expected, rtol=1e-6)
        assert answer.usage.prompt_tokens > len(TEXTS)
    one = openai_client.embeddings.create(model=name, input=QUESTION)
    np.testing.assert_allclose(one.data[0].embedding, expected[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ["x"] * 2049}, 400, "input"),
        ({"input": ["x", " "]}, 400, "input.1: is empty"),
        ({"input": [[1, 2]]}, 400, "check_embedding_ctx_length=False"),
        ({"input": [1, 2]}, 400, "check_embedding_ctx_length=False"),
        ({"dimensions": 7}, 400, "dimensions"),
        ({"model": "text-embedding-3-small"}, 404, "use 'tiny'"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_embeddings_that_cannot_be(client: httpx.Client, change: dict[str, object], status: int, named: str) -> None:
    """What cannot be embedded is refused by the field's name."""
    response = client.post("/v1/embeddings", json={"input": "x", **change})
    assert response.status_code == status
    assert named in response.json()["error"]["message"]


def test_embeddings_of_a_client_that_goes(
    engine: Engine, server: Server, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While texts are embedded the service answers, and so many calls of a tenant may wait that the next one is told 429."""
    begun, go_on, encode = threading.Event(), threading.Event(), engine.retriever.embedder.encode

    def wait(texts: list[str]) -> object:
        begun.set()
        assert go_on.wait(60)
        return encode(texts)

    monkeypatch.setattr(engine.retriever.embedder, "encode", wait)
    most = MAX_DOCUMENT_CALLS

    def post() -> int:
        return httpx.post(f"{address}/v1/embeddings", json={"input": "x"}, timeout=60).status_code

    threads = [threading.Thread(target=post) for _ in range(most)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.embeddings.count("") == most)
    assert begun.wait(60)
    assert httpx.get(f"{address}/healthz").status_code == 200
    refused = httpx.post(f"{address}/v1/embeddings", json={"input": "x"})
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    go_on.set()
    for thread in threads:
        thread.join()


def test_probes(client: httpx.Client, server: Server) -> None:
    """`/health` and `/version` answer as vLLM's do; a service that is stopping is not healthy; the model has a time."""
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": metadata.version("cacheblend")}
    model = client.get("/v1/models").json()["data"][0]
    assert model["created"] == server.started > 1.7e9
    server.scheduler.stop()
    assert client.get("/health").status_code == 503
