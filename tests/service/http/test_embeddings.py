"""Embeddings over the API."""

from __future__ import annotations

import threading

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
