"""A tenant that floods with uploads and questions, and hangs up: what another tenant asks is answered all the same."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api import MODEL, bearer, connected, serving_tenants
from engines import DOCUMENTS, QUESTION
from fakes import FakeEmbedder
from numpy.typing import NDArray
from waiting import wait_until

from cacheblend.service.http.server import Server
from cacheblend.service.serving.scheduler import ServingConfig

NAMES = ("hostile", "good")
SLOW = "slowly"
BOUND_S = 40.0  # of each answer, on a machine that does other work as well; the embedder is held for longer
LONG_TEXT = " ".join(f"word{place}" for place in range(400))


class SlowEmbedder(FakeEmbedder):
    """Takes its time for texts that say so: until its gate opens, or so many seconds each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.slow_s, self.entered = threading.Event(), 0.0, threading.Semaphore(0)
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `FakeEmbedder`."""
        self.texts += texts
        if any(SLOW in text for text in texts):
            self.entered.release()
            if self.slow_s:
                time.sleep(self.slow_s)
            else:
                self.gate.wait(80)
        return super().encode(texts)


@pytest.fixture
def embedder() -> SlowEmbedder:
    return SlowEmbedder()


Serve = Callable[..., tuple[Server, dict[str, httpx.Client]]]


@pytest.fixture
def serve(model_dir: Path, tmp_path: Path, embedder: SlowEmbedder) -> Iterator[Serve]:
    """A server with both tenants, the good one's documents ingested, and a client of each."""
    with contextlib.ExitStack() as stack:

        def start(*, stall_s: float = 60.0, **limits: Any) -> tuple[Server, dict[str, httpx.Client]]:
            serving = ServingConfig(guard_share=0, **limits)
            server, address = stack.enter_context(
                serving_tenants(NAMES, model_dir, tmp_path / "store", serving, embedder=embedder, stall_s=stall_s, max_tokens=2)
            )
            server.engines["good"].ingest(DOCUMENTS[:2])
            server.engines["hostile"].ingest(DOCUMENTS[:1])
            embedder.texts.clear()
            return server, {
                name: stack.enter_context(httpx.Client(base_url=address, timeout=BOUND_S, headers=bearer(name)))
                for name in NAMES
            }

        yield start
        embedder.gate.set()  # a stop waits for calls that compute


def chat(question: str = QUESTION, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "top_k": 1, **options}


def hang_up(client: httpx.Client, count: int, path: str, body: Callable[[int], dict[str, Any]], after_s: float = 0.3) -> None:
    """Send so many requests at once, and close their connections before they are answered."""

    def send(number: int) -> None:
        headers = dict(client.headers)
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{client.base_url}{path}", json=body(number), headers=headers, timeout=after_s)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(send, range(count)))


def check_served(good: httpx.Client) -> None:
    """The other tenant's question, lists, metrics and page are answered within the client's time-out."""
    responses = [good.post("/v1/chat/completions", json=chat())]
    responses += [good.get(path) for path in ("/v1/documents", "/v1/store", "/metrics", "/", "/readyz")]
    assert [response.status_code for response in responses] == [200] * 6, [response.text for response in responses]


def test_uploads_of_another_tenant(serve: Serve, embedder: SlowEmbedder) -> None:
    """Forty uploads, the first of which does not end: few wait, the rest are refused, and the other tenant is served."""
    server, clients = serve()
    statuses: list[int] = []
    most = server.scheduler.config.max_uploads

    def upload(number: int) -> None:
        body = {"documents": [{"id": f"h{number}", "text": f"{SLOW} {number}"}]}
        with contextlib.suppress(httpx.TransportError):
            statuses.append(clients["hostile"].post("/v1/documents?wait=true", json=body, timeout=90).status_code)

    with ThreadPoolExecutor(40) as threads:
        uploads = [threads.submit(upload, number) for number in range(40)]
        assert embedder.entered.acquire(timeout=60)
        wait_until(lambda: len(statuses) == 40 - most)
        assert set(statuses) == {429}
        refused = clients["hostile"].post("/v1/documents?wait=true", json={"documents": [{"text": "words"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["Retry-After"]) >= 1
        check_served(clients["good"])
        own = {"documents": [{"text": "words of its own"}]}
        assert clients["good"].post("/v1/documents?wait=true", json=own).status_code == 201
        assert clients["hostile"].get("/v1/documents").status_code == 200
        assert clients["hostile"].delete(f"/v1/documents/{DOCUMENTS[0]['id']}").status_code == 200
        embedder.gate.set()
        for one in uploads:
            one.result()
    assert sorted(statuses) == [201] * most + [429] * (40 - most)


def test_a_text_beside_many(serve: Serve, embedder: SlowEmbedder) -> None:
    """A request of one text is answered while a large one of the same tenant is being embedded."""
    _, clients = serve()
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(clients["good"].post, "/v1/embeddings", json={"input": [SLOW] * 400}, timeout=60)
        assert embedder.entered.acquire(timeout=60)
        small = clients["good"].post("/v1/embeddings", json={"input": "hello"})
        assert (small.status_code, large.done()) == (200, False)
        embedder.gate.set()
        assert len(large.result().json()["data"]) == 400


def test_questions_of_another_tenant(serve: Serve, embedder: SlowEmbedder) -> None:
    """Forty slow questions whose clients have gone are given up, and the other tenant's waits for one or two of them."""
    server, clients = serve()
    embedder.slow_s = 0.5
    hang_up(clients["hostile"], 40, "/v1/chat/completions", lambda number: chat(f"{SLOW} {number}?"))
    asked = len(embedder.texts)
    check_served(clients["good"])
    assert sum(SLOW in text for text in embedder.texts[asked:]) <= 3
    wait_until(lambda: not server.preparing.is_busy)
    assert sum(SLOW in text for text in embedder.texts) < 12


@pytest.mark.parametrize("known", [False, True])
def test_half_an_upload(serve: Serve, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Nothing stays of an upload whose client leaves while KV is computed; what it would replace is as it was."""
    server, clients = serve()
    engine, gate, computing = server.engines["hostile"], threading.Event(), threading.Event()
    before = {entry.key for entry in engine.store.ls()}
    listed = clients["hostile"].get("/v1/documents").json()
    precompute_documents = engine.fusor.precompute_documents

    def slow(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, kv in enumerate(precompute_documents(*arguments, **options)):
            yield kv
            if number == 2:
                computing.set()
                assert gate.wait(60)

    monkeypatch.setattr(engine.fusor, "precompute_documents", slow)
    id_ = str(DOCUMENTS[0]["id"]) if known else "new"
    body = json.dumps({"documents": [{"id": id_, "text": LONG_TEXT}]})
    head = {"Host": "localhost", **bearer("hostile"), "Content-Type": "application/json", "Content-Length": len(body)}
    lines = ["POST /v1/documents?wait=true HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
    with connected(str(clients["hostile"].base_url).rstrip("/")) as leaving:
        leaving.sendall("\r\n".join([*lines, "", body]).encode())
        assert computing.wait(60)
    wait_until(lambda: 'cacheblend_http_errors_total{status="499"} 1.0' in clients["good"].get("/metrics").text)
    gate.set()
    wait_until(lambda: not server.uploads.is_busy)
    monkeypatch.undo()
    engine.store.flush()
    assert {entry.key for entry in engine.store.ls()} == before
    assert clients["hostile"].get("/v1/documents").json() == listed
    found = clients["hostile"].post("/v1/chat/completions", json=chat("word7 word8 word9", return_chunks=True)).json()
    assert found["cacheblend"]["chunks"][0]["document_id"] == DOCUMENTS[0]["id"]


@pytest.mark.parametrize("slow_s", [0.0, 0.9])
def test_the_deadline_counts_from_arrival(serve: Serve, embedder: SlowEmbedder, slow_s: float) -> None:
    """A request that is late is a 504 wherever it is: in an embedder that does not end, or decoding after a slow one."""
    _, clients = serve(deadline_s=1.0)
    embedder.slow_s = slow_s
    response = clients["hostile"].post("/v1/chat/completions", json=chat(SLOW, max_tokens=300))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded"), response.text


@pytest.mark.parametrize("words", [600, 100_000])
def test_a_question_too_long_is_not_embedded(serve: Serve, embedder: SlowEmbedder, words: int) -> None:
    """A question beyond the model's positions is refused before it is embedded."""
    _, clients = serve()
    text = {"model": MODEL, "prompt": "word " * words, "num_chunks": 1}
    for path, body in (("/v1/chat/completions", chat("word " * words)), ("/v1/completions", text)):
        response = clients["good"].post(path, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert embedder.texts == []


def test_readiness(serve: Serve, embedder: SlowEmbedder, tmp_path: Path) -> None:
    """A service that does not get on, or has lost a store's folder, is not ready, and says why."""
    server, clients = serve(stall_s=0.3)
    assert clients["good"].get("/readyz").status_code == 200
    body = {"documents": [{"text": SLOW}]}
    upload = threading.Thread(target=lambda: clients["hostile"].post("/v1/documents?wait=true", json=body))
    upload.start()
    wait_until(lambda: server.uploads.stalled_s > 0.3)
    response = clients["good"].get("/readyz")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert "does not get on" in response.json()["error"]["message"]
    embedder.gate.set()
    upload.join()
    assert clients["good"].get("/readyz").status_code == 200
    folder = (tmp_path / "store" / "tenants" / "hostile" / "kv").rename(tmp_path / "aside")
    response = clients["good"].get("/readyz")
    assert (response.status_code, "folder" in response.json()["error"]["message"]) == (503, True)
    assert str(tmp_path) not in response.text
    folder.rename(tmp_path / "store" / "tenants" / "hostile" / "kv")
    assert clients["good"].get("/readyz").status_code == 200
