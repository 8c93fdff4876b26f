"""Traces of requests, as a collector gets them."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from api import MODEL, listening
from engines import DOCUMENTS, QUESTION

from cacheblend.base.errors import ConfigError
from cacheblend.service import Engine
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.server import Server
from cacheblend.service.serving.config import ServingConfig

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed; pip install 'cacheblend[otel]'")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import wait_until

from cacheblend.service.http.tracing import Traces

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "recompute_ratio": 0.15}
STAGES = ["retrieve", "queue", "lookup", "prefill", "decode"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Gets every span, in place of a collector."""
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter), MODEL)
    monkeypatch.setattr(Traces, "to_collector", lambda *_: traces)
    return exporter


@pytest.fixture
def client(engine: Engine, exporter: InMemorySpanExporter) -> Iterator[httpx.Client]:  # noqa: ARG001  # set before
    http_config = HttpConfig(served_model_name=MODEL, otlp_endpoint="http://collector:4318/v1/traces")
    with (
        Server(engine.config, ServingConfig(), http_config, engine=engine) as server,
        listening(server) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def spans_of(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """The spans of one request by name, once so many have come."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_and_its_stages(client: httpx.Client, exporter: InMemorySpanExporter) -> None:
    """A request is a span in its caller's trace, its stages are spans within it, in order, and no text is told."""
    client.post("/v1/documents", json={"documents": DOCUMENTS}).raise_for_status()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    client.post("/v1/chat/completions", json=CHAT, headers=headers).raise_for_status()
    spans = spans_of(exporter, len(STAGES) + 1)
    request = spans["answer"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT
    assert sorted(spans) == sorted([*STAGES, "answer"])
    last = request.start_time or 0
    for name in STAGES:
        span = spans[name]
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert last <= (span.start_time or 0) + 1000  # to the clock's microsecond
        assert (span.start_time or 0) <= (span.end_time or 0) <= (request.end_time or 0) + 1000
        last = span.start_time or 0
    told = dict(spans["lookup"].attributes or {}) | dict(spans["prefill"].attributes or {}) | dict(request.attributes or {})
    assert told["cacheblend.hits"] > 0
    assert sum(value for name, value in told.items() if name.startswith("cacheblend.loaded_bytes.")) > 0
    assert told["cacheblend.outcome"] == "answered"
    assert all(QUESTION not in str(value) for span in spans.values() for value in (span.attributes or {}).values())


def test_a_request_without_a_trace(client: httpx.Client, exporter: InMemorySpanExporter) -> None:
    """Without the header, or with one that is none, a request is a trace of its own."""
    body = {**CHAT, "documents": [{"text": "brought"}]}
    client.post("/v1/chat/completions", json=body, headers={"traceparent": "nonsense"}).raise_for_status()
    request = spans_of(exporter, len(STAGES) + 1)["answer"]
    assert request.parent is None


def test_what_a_collector_gets(engine: Engine) -> None:
    """With an endpoint alone spans go there by OTLP, at the latest when the service ends."""
    got: list[tuple[str, str, int]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["Content-Type"], len(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        config = HttpConfig(served_model_name=MODEL, otlp_endpoint=endpoint)
        try:
            with Server(engine.config, ServingConfig(), config, engine=engine) as server, listening(server) as address:
                body = {**CHAT, "documents": [{"text": "brought"}]}
                httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        finally:
            collector.shutdown()
            thread.join()
    assert [(path, kind) for path, kind, _ in got] == [("/v1/traces", "application/x-protobuf")]


def test_nothing_is_imported_without_an_endpoint() -> None:
    """Who traces nothing pays nothing: the SDK is not even imported (FastAPI imports the API); a bad endpoint is refused."""
    found = (
        "import sys, cacheblend.service.http.server; print(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        HttpConfig(otlp_endpoint="collector:4318")
