"""Counters for Prometheus. No label names a salt, a document or a question; those of the quality guard alone name a tenant."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend.service.engine.engine import Engine

from ..serving import Done, Failed, Scheduler, ServedRequest
from .guard_metrics import GuardMetrics

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
DEVIATION = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
PREFIX_GAUGES = {
    "parts": "Prefix blocks held, each counted once a kind of layer.",
    "bytes": "Bytes of their keys and values.",
    "budget_bytes": "Most bytes of them.",
}
PREFIX_COUNTERS = {
    "lookups": "Prompts whose beginning was looked up.",
    "hits": "Prompts of which at least one block was found.",
    "evictions": "Parts of blocks that made room for others.",
}


class Metrics:
    """Counts the requests of one server, in a registry of its own.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self._registry = registry = CollectorRegistry()
        self.guard = GuardMetrics(registry, model)
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
            "cacheblend_request_seconds", "A whole request.", ["method"], registry=registry, buckets=SECONDS
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

    def observe(self, request: ServedRequest, how: Done | Failed | None) -> None:
        """Count a request that ended; `Scheduler` calls it."""
        method = request.prepared.method
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

    def count_error(self, status: int) -> None:
        """Count a response with an error status."""
        self._errors.labels(str(status)).inc()

    def watch(self, scheduler: Scheduler, engines: Iterable[Engine]) -> None:
        """Also tell the state of scheduler and stores, as it is when asked."""
        self._registry.register(_State(scheduler, tuple(engines)))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _State(Collector):
    """What is read off the scheduler, the stores and the prefix blocks at each scrape, summed over tenants."""

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
            for tier in ("ram", "nvme"):
                metric.add_metric([tier], sum(getattr(getattr(one, tier), name) for one in stats))
            yield metric
        for name in ("misses", "damaged", "failed_writes"):
            yield CounterMetricFamily(
                f"cacheblend_store_{name}", f"The stores' {name}.", value=sum(getattr(one, name) for one in stats)
            )
        prefixes = [engine.prefixes.stats() for engine in self._engines]
        for name, what in PREFIX_GAUGES.items():
            yield GaugeMetricFamily(f"cacheblend_prefix_{name}", what, value=sum(getattr(one, name) for one in prefixes))
        for name, what in PREFIX_COUNTERS.items():
            yield CounterMetricFamily(f"cacheblend_prefix_{name}", what, value=sum(getattr(one, name) for one in prefixes))
