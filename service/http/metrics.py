"""Counters for Prometheus, and a line of the log for each request."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend.service.engine.engine import Engine
from cacheblend.service.serving.quality_guard import ShadowReport
from cacheblend.service.serving.scheduler import Scheduler
from cacheblend.service.serving.served_request import Done, Failed, ServedRequest

from .errors import REQUEST_ID, error_response

logger = logging.getLogger(__name__)
HEADER = "x-request-id"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DEVIATION = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
PREFIX_GAUGES = {
    "parts": "Prefix blocks held, each counted once a kind of layer.",
    "bytes": "Bytes of their keys and values.",
    "budget_bytes": "Upper bound of their bytes.",
}
PREFIX_COUNTERS = {
    "lookups": "Prompts whose beginning was looked up.",
    "hits": "Prompts of which at least one block was found.",
    "evictions": "Parts of blocks that made room for others.",
}
REMOTE_COUNTERS = {
    "hits": "entries that requests found there",
    "misses": "entries that were looked up and not there",
    "failures": "calls that were not answered, or too late",
    "damaged": "entries whose bytes were not what was written",
    "read_bytes": "bytes that came",
    "sent": "entries that were written",
    "sent_bytes": "bytes that were written",
    "dropped_writes": "changes that were not made",
}
AGREEMENT = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
KL_NATS = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
RELATIVE_KV_ERROR = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """Counts the requests of one server, in a registry of its own.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._scraping, self._scraped, self._scrape = asyncio.Lock(), 0.0, b""
        self._model = model
        self._requests = Counter("cacheblend_requests", "Requests that ended.", ["method", "outcome"], registry=registry)
        self._ttft_s = Histogram(
            "cacheblend_ttft_seconds",
            "Question and chunks in hand to first token, the queue included.",
            ["method"],
            registry=registry,
            buckets=SECONDS,
        )
        self._queue_s = Histogram("cacheblend_queue_seconds", "Time in the queue.", registry=registry, buckets=SECONDS)
        self._total_s = Histogram(
            "cacheblend_request_seconds", "Time from arrival to the last token.", ["method"], registry=registry, buckets=SECONDS
        )
        self._tokens = Counter(
            "cacheblend_tokens",
            "Tokens by what became of them: prompt, reused, recomputed, generated.",
            ["kind"],
            registry=registry,
        )
        self._chunks = Counter(
            "cacheblend_chunks", "Chunks of prompts by where their KV came from.", ["source"], registry=registry
        )
        self._loaded = Counter("cacheblend_loaded_bytes", "Bytes of stored KV loaded.", ["tier"], registry=registry)
        self._deviation = Histogram(
            "cacheblend_kv_deviation",
            "Mean KV deviation of a request's reused tokens, where it was measured.",
            registry=registry,
            buckets=DEVIATION,
        )
        self._errors = Counter("cacheblend_http_errors", "Responses with an error status.", ["status"], registry=registry)
        labels = ["namespace", "model"]
        self._evaluations = Counter(
            "cacheblend_shadow_evaluations",
            "Sampled requests by what became of their shadow evaluation: compared, dropped, failed.",
            [*labels, "outcome"],
            registry=registry,
        )

        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"cacheblend_guard_{name}", documentation, labels, registry=registry, buckets=buckets)

        self._guard_agreement = histogram(
            "agreement", "Share of full prefill's first tokens that blending draws too.", AGREEMENT
        )
        self._guard_kl = histogram(
            "first_token_kl_nats", "KL divergence of the first token's distribution, full from blended.", KL_NATS
        )
        self._guard_kv_error = histogram(
            "relative_kv_error", "Squared difference of the KV to full prefill's, over its squared size.", RELATIVE_KV_ERROR
        )
        self._full_recompute = Gauge(
            "cacheblend_guard_full_recompute",
            "1 while the guard recomputes every prompt in full, else 0.",
            labels,
            registry=registry,
        )

    def observe(self, request: ServedRequest, how: Done | Failed | None) -> None:
        """Count a request that ended; `Scheduler` calls it."""
        method = request.prepared.method
        if request.is_follower:  # another choice of a request that is counted
            if isinstance(how, Done):
                self._tokens.labels("generated").inc(len(how.answer.token_ids))
            return
        if how is None:
            self._requests.labels(method, "cancelled").inc()
            return
        if isinstance(how, Failed):
            self._requests.labels(method, "failed").inc()
            return
        plan, timings = how.answer.plan, how.answer.timings
        self._requests.labels(method, how.finish_reason).inc()
        self._ttft_s.labels(method).observe(timings.ttft_s)
        self._queue_s.observe(how.queue_s)
        self._total_s.labels(method).observe(time.perf_counter() - request.prepared.started)
        self._tokens.labels("prompt").inc(plan.prompt_tokens)
        stored = sum(
            len(segment.token_ids) for segment in plan.segments if segment.kind == "reused" and segment.tier is not None
        )
        self._tokens.labels("reused").inc(max(0.0, stored - plan.recomputed_tokens))
        self._tokens.labels("recomputed").inc(plan.recomputed_tokens)
        self._tokens.labels("generated").inc(len(how.answer.token_ids))
        for segment in plan.segments:
            if segment.key is not None:
                self._chunks.labels(segment.tier or "computed").inc()
        for tier, loaded in plan.loaded_bytes.items():
            self._loaded.labels(tier).inc(loaded)
        measured = how.deviation_N[how.deviation_N > 0]
        if len(measured):
            self._deviation.observe(float(measured.mean()))

    def observe_shadow(self, report: ShadowReport) -> None:
        """Count a shadow evaluation by the tenant's name and the model, never by a salt; `Scheduler` calls it."""
        labels = report.tenant, self._model
        self._evaluations.labels(*labels, report.outcome).inc()
        self._full_recompute.labels(*labels).set(report.full_recompute)
        if (found := report.comparison) is not None:
            self._guard_agreement.labels(*labels).observe(found.agreement)
            self._guard_kl.labels(*labels).observe(found.first_token_kl_nats)
            self._guard_kv_error.labels(*labels).observe(found.relative_kv_error)

    def count_error(self, status: int) -> None:
        """Count a response with an error status."""
        self._errors.labels(str(status)).inc()

    def watch(self, scheduler: Scheduler, engines: Iterable[Engine]) -> None:
        """Also export the state of scheduler and stores, as it is when asked."""
        self._registry.register(_State(scheduler, tuple(engines)))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    async def scrape(self) -> bytes:
        """`text`, made in a thread, once for all who asked before its making began."""
        came = time.perf_counter()
        async with self._scraping:
            if self._scraped < came:
                self._scraped = time.perf_counter()
                self._scrape = await run_in_threadpool(self.text)
            return self._scrape


class _State(Collector):
    """State of the scheduler, the stores and the prefix blocks, read at each scrape and summed over tenants."""

    def __init__(self, scheduler: Scheduler, engines: tuple[Engine, ...]) -> None:
        self._scheduler, self._engines = scheduler, engines

    def describe(self) -> Iterable[Metric]:
        """Nothing: the stores are not asked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All of them, now."""
        state = self._scheduler.state
        requests = GaugeMetricFamily("cacheblend_requests_now", "Requests by state.", labels=["state"])
        for name in ("waiting", "prefilling", "decoding"):
            requests.add_metric([name], getattr(state, name))
        yield requests
        stats = [engine.store.stats() for engine in self._engines]
        for name, kind in (("entries", "gauge"), ("bytes", "gauge"), ("hits", "counter"), ("evictions", "counter")):
            family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            metric = family(f"cacheblend_store_{name}", f"The stores' {name} by tier.", labels=["tier"])
            for tier in dict.fromkeys(tier for one in stats for tier in one.tiers):
                metric.add_metric([tier], sum(getattr(one.tiers[tier], name) for one in stats if tier in one.tiers))
            yield metric
        for name in ("misses", "damaged", "failed_writes"):
            yield CounterMetricFamily(
                f"cacheblend_store_{name}", f"The stores' {name}.", value=sum(getattr(one, name) for one in stats)
            )
        remotes = [one.remote for one in stats if one.remote is not None]
        for name, what in REMOTE_COUNTERS.items() if remotes else ():
            value = sum(getattr(one, name) for one in remotes)
            yield CounterMetricFamily(f"cacheblend_remote_{name}", f"The remote tiers' {what}.", value=value)
        if remotes:
            unavailable = sum(one.state != "closed" for one in remotes)
            yield GaugeMetricFamily(
                "cacheblend_remote_unavailable", "Remote tiers that are not asked, since they do not answer.", unavailable
            )
        prefixes = [engine.prefixes.stats() for engine in self._engines]
        for name, what in PREFIX_GAUGES.items():
            yield GaugeMetricFamily(f"cacheblend_prefix_{name}", what, value=sum(getattr(one, name) for one in prefixes))
        for name, what in PREFIX_COUNTERS.items():
            yield CounterMetricFamily(f"cacheblend_prefix_{name}", what, value=sum(getattr(one, name) for one in prefixes))


class RequestLog:
    """Middleware: assigns each request an id, logs its end, counts errors, and answers unexpected ones.

    The id is the caller's own `X-Request-Id`, where that is a plain word of at most 64 characters, or a new one.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
        request_id = given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else uuid.uuid4().hex
        token = REQUEST_ID.set(request_id)
        started, status = time.perf_counter(), 0
        scope.setdefault("state", {})["arrived"] = started

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER.encode(), request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # the response has begun; the server cuts it off
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            if status >= 400:
                self._metrics.count_error(status)
            path = getattr(scope.get("route"), "path", None)  # the route's template, which has no ids
            seconds = time.perf_counter() - started
            # A status of 0: the client left before there was one.
            logger.info("%s %s %d in %.4f s, request %s", scope["method"][:16], path, status, seconds, request_id)
            REQUEST_ID.reset(token)
