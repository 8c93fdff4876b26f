"""Documents, stores, counters, keys, logs and the page."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api import MODEL, listening
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionConfig
from cacheblend.retriever import RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.http.app import STATIC, run
from cacheblend.service.http.config import HttpConfig, TenantConfig, hash_key, new_key
from cacheblend.service.http.server import Server
from cacheblend.service.serving.config import ServingConfig

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
KEYS = {name: new_key() for name in ("one", "two")}


def test_documents(client: httpx.Client) -> None:
    """A document is uploaded, listed, shown, replaced, pinned and deleted; its id may hold a slash."""
    path = "/v1/documents/notes/one"
    report = client.post("/v1/documents", json={"documents": [{"id": "notes/one", "title": "One", "text": "first words"}]})
    assert report.status_code == 201
    assert (report.json()["added"], report.json()["computed"]) == (1, 1)
    assert {document["id"] for document in client.get("/v1/documents").json()["data"]} == {
        "notes/one",
        *(document["id"] for document in DOCUMENTS),
    }
    shown = client.get(path).json()
    assert "".join(part["text"] for part in shown["content"]) == "One\nfirst words"
    assert [(part["lines"], part["headings"]) for part in shown["content"]] == [([1, 1], [])]
    assert not shown["pinned"]
    assert client.put(path, json={"text": "other words"}).json()["replaced"] == 1
    assert client.post(f"{path}/pin", json={}).json()["pinned"]
    assert not client.post(f"{path}/pin", json={"pinned": False}).json()["pinned"]
    assert client.delete(path).json() == {"id": "notes/one", "object": "document", "deleted": True}
    assert client.get(path).status_code == 404


def test_counters(client: httpx.Client, engine: Engine) -> None:
    """The counters tell what a request did, and no label holds anything of the request."""

    def value(line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = value('cacheblend_store_hits_total{tier="nvme"}') + value('cacheblend_store_hits_total{tier="ram"}')
    assert client.post("/v1/chat/completions", json={**CHAT, "num_chunks": 3, "cache_salt": "secret-salt"}).status_code == 200
    engine.drain()
    answer = client.post("/v1/chat/completions", json={**CHAT, "num_chunks": 3}).json()
    assert client.post("/v1/chat/completions", json={}).status_code == 400
    assert value('cacheblend_requests_total{method="blend",outcome="length"}') == 2
    assert value('cacheblend_ttft_seconds_count{method="blend"}') == 2
    assert value('cacheblend_tokens_total{kind="recomputed"}') == pytest.approx(answer["cacheblend"]["recomputed_tokens"])
    assert value('cacheblend_chunks_total{source="computed"}') == 3
    assert value('cacheblend_http_errors_total{status="400"}') == 1
    after = value('cacheblend_store_hits_total{tier="nvme"}') + value('cacheblend_store_hits_total{tier="ram"}')
    assert after - before == 3
    assert "secret-salt" not in client.get("/metrics").text
    store = client.get("/v1/store").json()
    prediction = store["prediction"]
    assert (prediction["recompute_ratio"], prediction["loss"]) == (0.15, None)
    assert prediction["costs"][-1] == {"ratio": 1.0, "work_share": 1.0, "prefill_s": None}
    assert store["nvme"]["entries"] == value('cacheblend_store_entries{tier="nvme"}') > 0
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_scrapes_share_their_work(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for the counters at once, all have them, and the counters are read twice at most."""
    read, texts = server.metrics.text, list[bytes]()

    def count() -> bytes:
        texts.append(read())
        return texts[-1]

    monkeypatch.setattr(server.metrics, "text", count)

    async def ask_all() -> list[bytes]:
        return await asyncio.gather(*(server.metrics.scrape() for _ in range(40)))

    assert set(asyncio.run(ask_all())) == set(texts)
    assert len(texts) <= 2


def test_tenants_never_meet(model_dir: Path, tmp_path: Path) -> None:
    """A tenant sees, hits and counts its own documents alone, and without a key nothing is served."""
    tenants = [TenantConfig(name=name, api_key_sha256=(hash_key(key),)) for name, key in KEYS.items()]
    config = EngineConfig(
        model=str(model_dir),
        store_dir=tmp_path,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    with (
        Server(
            config, ServingConfig(guard_share=0.0), HttpConfig(served_model_name=MODEL), tenants, embedder=FakeEmbedder()
        ) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        assert len({id(engine.fusor) for engine in server.engines.values()}) == 1
        one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
        assert client.post("/v1/documents", json={"documents": DOCUMENTS}, headers=one).status_code == 201
        assert client.get("/v1/documents", headers=two).json()["data"] == []
        assert client.get("/v1/documents/for", headers=two).status_code == 404
        asked = {**CHAT, "documents": [{key: DOCUMENTS[0][key] for key in ("title", "text")}]}
        first = client.post("/v1/chat/completions", json=asked, headers=one).json()["cacheblend"]
        other = client.post("/v1/chat/completions", json=asked, headers=two).json()["cacheblend"]
        assert (first["misses"], other["hits"]) == (0, 0)
        assert client.get("/v1/store", headers=one).json()["nvme"]["entries"] > 0
        for headers in ({}, {"Authorization": "Bearer cb-wrong"}, {"Authorization": f"Basic {KEYS['one']}"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/v1/documents")):
                response = client.request(method, path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/healthz").status_code == 200
        assert "one" not in re.findall(r'"(\w+)"', client.get("/metrics").text)


@pytest.mark.parametrize(
    ("tenants", "named"),
    [
        ([("UPPER", "a" * 64)], "lower-case"),
        ([("../x", "a" * 64)], "lower-case"),
        ([("a", "short")], "64 hex digits"),
        ([("a", "a" * 64), ("a", "b" * 64)], "each name once"),
        ([("a", "a" * 64), ("b", "a" * 64)], "only one tenant"),
    ],
)
def test_bad_tenants(engine: Engine, tenants: list[tuple[str, str]], named: str) -> None:
    """Tenants whose name is no folder's, or who share a name or a key, are refused."""
    with pytest.raises(ConfigError, match=named):
        Server(engine.config, tenants=[TenantConfig(name=name, api_key_sha256=(key,)) for name, key in tenants])


def test_request_ids(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A request's log line and response have one id: the caller's where it is a plain word, else a new one."""
    caplog.set_level(logging.INFO, "cacheblend.service.http.metrics")
    assert client.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    made = client.get("/healthz", headers={"X-Request-Id": "not a word"}).headers["X-Request-Id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    wait_until(lambda: len(caplog.messages) >= 2)  # a line is written once its response is sent
    first, second = caplog.messages
    assert re.fullmatch(r"GET /healthz 200 in 0\.\d+ s, request mine-1", first)
    assert second.endswith(f"request {made}")


def test_the_log_has_no_ids(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A request's log line has its route, and nothing of what its client wrote into path or method."""
    caplog.set_level(logging.INFO, "cacheblend.service.http.metrics")
    client.get("/v1/documents/secret-id")
    client.get("/secret-path")
    client.request("SECRET" * 100, "/healthz")
    wait_until(lambda: len(caplog.messages) >= 3)
    assert [line.split()[1] for line in caplog.messages] == ["/v1/documents/{id_:path}", "None", "/healthz"]
    assert "secret" not in caplog.text
    assert max(map(len, caplog.messages)) < 200


def test_page(client: httpx.Client) -> None:
    """The page and its files come with headers that let them load nothing else, and put no text in as markup."""
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
        assert client.get(path).status_code == 200
    for file in STATIC.iterdir():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|https?://|eval\(", file.read_text()), file
    ids = set(re.findall(r'\bid="(\w+)"', page.text))
    assert set(re.findall(r'\$\("(\w+)"\)', (STATIC / "page.js").read_text())) <= ids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_leaves_by_the_front_door(
    server: Server, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The signal that uvicorn raises once more when it has stopped does not end the process before the store is closed."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: signal.raise_signal(number))
    try:
        with pytest.raises(SystemExit) as left:
            run(server)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert left.value.code == 0


def test_an_open_address_is_warned_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that everybody on the network may use says so."""
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        caplog.clear()
        with Server(engine.config, http=HttpConfig(host=host), engine=engine) as server:
            run(server)
        assert ("open to everybody" in caplog.text) is warned


@pytest.fixture
def guarded_client(model_dir: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """A service of two tenants that checks every blended request against a floor that cannot be met."""
    tenants = [TenantConfig(name=name, api_key_sha256=(hash_key(key),)) for name, key in KEYS.items()]
    config = EngineConfig(
        model=str(model_dir),
        store_dir=tmp_path,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
        fusion=FusionConfig(recompute_ratio=0.15),
    )
    serving = ServingConfig(guard_share=1.0, guard_floor=1.0, guard_tokens=40, guard_window=1)
    with (
        Server(config, serving, HttpConfig(served_model_name=MODEL), tenants, embedder=FakeEmbedder()) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def test_what_the_guard_finds(guarded_client: httpx.Client) -> None:
    """Counters and `/v1/store` show shadow evaluations and full recompute by tenant, and never by salt."""
    client = guarded_client
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    assert client.post("/v1/documents", json={"documents": DOCUMENTS}, headers=one).status_code == 201

    def ask(checked: int, **options: object) -> float | None:
        answer = client.post("/v1/chat/completions", json={**CHAT, **options}, headers=one).json()
        wait_until(lambda: client.get("/v1/store", headers=one).json()["quality"]["evaluated"] >= checked)
        return answer["cacheblend"]["recompute_ratio"]

    assert [ask(number) for number in (1, 2, 3)] == [0.15, None, None]
    assert ask(3, cache_salt="secret-salt") is None
    assert ask(3, recompute_ratio=0.3) == 0.3
    quality = client.get("/v1/store", headers=one).json()["quality"]
    assert quality["full_recompute"]
    assert quality["floor"] == 1.0
    assert client.get("/v1/store", headers=two).json()["quality"] == {
        "evaluated": 0,
        "agreement": None,
        "first_token_kl_nats": None,
        "floor": 1.0,
        "full_recompute": False,
    }
    metrics = client.get("/metrics").text

    def value(name: str, **labels: str) -> float:
        wanted = ",".join(f'{key}="{label}"' for key, label in sorted(labels.items()))
        found = re.search(rf"^cacheblend_{name}{{{wanted}}} (\S+)$", metrics, re.MULTILINE)
        assert found, f"{name}{{{wanted}}}"
        return float(found[1])

    common = {"namespace": "one", "model": MODEL}
    assert value("shadow_evaluations_total", **common, outcome="compared") == 3
    assert value("guard_full_recompute", **common) == 1.0
    for histogram in ("agreement", "first_token_kl_nats", "relative_kv_error"):
        assert value(f"guard_{histogram}_count", **common) == 3
        assert value(f"guard_{histogram}_sum", **common) > 0
    assert "secret-salt" not in metrics
    assert 'namespace="two"' not in metrics
