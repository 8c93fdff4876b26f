"""Documents, stores, counters, keys, logs and the page."""

import asyncio
import logging
import re
import signal
from itertools import count
from pathlib import Path

import httpx
import pytest
from api import MODEL, bearer, serving_tenants
from engines import DOCUMENTS, QUESTION, OpenEngine
from fakes import FakeEmbedder
from waiting import wait_until

from cacheblend.base.threads import Progress
from cacheblend.service import Engine
from cacheblend.service.http.app import STATIC, run
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.serving import quality_guard
from cacheblend.service.serving.scheduler import ServingConfig

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}


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
    assert value("cacheblend_time_per_output_token_seconds_count") == 2
    store = client.get("/v1/store").json()
    assert store["documents"] == value("cacheblend_indexed_documents") == len(DOCUMENTS)
    assert store["chunks"] == value("cacheblend_indexed_chunks") == engine.retriever.chunk_count
    assert store["ram"]["budget_bytes"] == value('cacheblend_store_budget_bytes{tier="ram"}') > 0
    assert value("process_resident_memory_bytes") > 0
    assert f'model="{MODEL}"' in client.get("/metrics").text.partition("cacheblend_build_info{")[2]
    assert store["nvme"]["entries"] == value('cacheblend_store_entries{tier="nvme"}') > 0
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_a_stream_that_fails(client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after the first event ends the stream, and is counted as an error's response is."""
    decode, calls = engine.fusor.decoder.decode, count()
    monkeypatch.setattr(engine.fusor.decoder, "decode", lambda *given: decode(*given) if next(calls) < 2 else 1 // 0)
    body = {**CHAT, "stream": True, "num_chunks": 0, "max_tokens": 20, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, "internal_error" in answer.text.splitlines()[-2]) == (200, True)
    assert 'cacheblend_http_errors_total{status="500"} 1.0' in client.get("/metrics").text


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


def test_log(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """A request's log line and response have one id, the caller's where it is a plain word. The line has the route, and nothing
    of what its client wrote into path or method. An upgrade that there is not has no further line.
    """
    caplog.set_level(logging.INFO, "cacheblend.service.http.guard")
    assert client.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    made = client.get("/healthz", headers={"X-Request-Id": "not a word"}).headers["X-Request-Id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    client.get("/v1/documents/secret-id")
    client.get("/secret-path")
    client.request("SECRET" * 100, "/healthz", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    wait_until(lambda: len(caplog.messages) >= 5)  # a line is written once its response is sent
    first, second, *others = caplog.messages
    assert re.fullmatch(r"GET /healthz 200 in 0\.\d+ s, request mine-1", first)
    assert second.endswith(f"request {made}")
    assert [line.split()[1] for line in others] == ["/v1/documents/{id_:path}", "None", "/healthz"]
    assert not re.search("secret|upgrade|WebSocket", caplog.text)
    assert max(map(len, caplog.messages)) < 200


def test_answers_are_summed_up_in_the_log(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    """An answer's line has model, tokens, time to first token, hits and tenant, streamed or not; the page's polls have none."""
    caplog.set_level(logging.INFO, "cacheblend.service.http.guard")
    for _ in range(2):
        client.get("/v1/store")
        client.get("/v1/ingests")
    client.get("/v1/store", headers={"Host": "other"})  # refused
    for stream in (False, True):
        client.post("/v1/chat/completions", json={**CHAT, "num_chunks": 3, "stream": stream})
    wait_until(lambda: len(caplog.messages) >= 3)
    refused, *answers = caplog.messages
    assert "421" in refused
    for line in answers:
        assert re.search(
            r"tenant=- model=tiny method=blend prompt_tokens=\d+ completion_tokens=4 ttft_s=\d\.\d+ hits=3 misses=0$", line
        ), line


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


def test_an_index_that_was_made_anew(client: httpx.Client, engine: Engine, open_engine: OpenEngine) -> None:
    """After a `cacheblend reindex` beside the service, what searches is refused with the remedy, and documents are listed."""
    open_engine(store_dir=engine.config.store_dir, embedder=FakeEmbedder("wide", dimensions=32), rewriting=Progress())
    for answer in (client.post("/v1/chat/completions", json=CHAT), client.get("/v1/store")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "index_changed")
        assert "start the service anew" in answer.json()["error"]["message"]
    assert client.get("/v1/documents").status_code == 200


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
            caplog.set_level(logging.INFO, "cacheblend.service.http.app")
            run(server)
        assert ("open to all" in caplog.text) is warned
        assert f"has {len(DOCUMENTS)} documents" in caplog.text


def test_what_the_guard_finds(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters and `/v1/store` show shadow evaluations by tenant, and never by salt; here every blended request is checked."""
    monkeypatch.setattr(quality_guard, "GUARD_TOKENS", 40)
    limits = ServingConfig(guard_share=1.0)
    one, two = bearer("one"), bearer("two")
    with (
        serving_tenants(["one", "two"], model_dir, tmp_path, limits) as (_, address),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        assert client.post("/v1/documents?wait=true", json={"documents": DOCUMENTS}, headers=one).status_code == 201

        def ask(checked: int, **options: object) -> None:
            assert client.post("/v1/chat/completions", json={**CHAT, **options}, headers=one).status_code == 200
            wait_until(lambda: client.get("/v1/store", headers=one).json()["quality"]["evaluated"] >= checked)

        for number in (1, 2, 3):
            ask(number)
        ask(3, cache_salt="secret-salt")
        first, second = (client.get("/v1/store", headers=headers).json()["quality"] for headers in (one, two))
        metrics = client.get("/metrics").text
    assert (first["evaluated"], first["agreement"] < 1) == (3, True)
    assert (second["evaluated"], second["agreement"]) == (0, None)
    labels = f'model="{MODEL}",namespace="one"'
    for name, value in (
        (f'shadow_evaluations_total{{{labels},outcome="compared"}}', 3.0),
        *((f"guard_{name}_count{{{labels}}}", 3.0) for name in ("agreement", "first_token_kl_nats", "relative_kv_error")),
    ):
        assert f"cacheblend_{name} {value}" in metrics, name
    assert "secret-salt" not in metrics
    assert 'namespace="two"' not in metrics
