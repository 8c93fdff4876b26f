"""Counters for Prometheus."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool

from cacheblend import __version__
from cacheblend.blend.fidelity import Comparison
from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.request import Done, Failed, Request
from cacheblend.service.serving.scheduler import Scheduler

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Of a comparison's fields.
GUARD_HISTOGRAMS = {
    "agreement": ("Share of full prefill's first tokens that blending draws too.", (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)),
    "first_token_kl_nats": (
        "How far blending's first token is from full prefill's, as KL divergence in nats; 0 is best.",
        (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0),
    ),
    "relative_kv_error": ("Squared error of blended KV, over its squared size.", (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)),
}
TIER_METRICS = {  # of a tier's statistics, summed over tenants
    "entries": "Chunks whose KV is stored now.",
    "bytes": "Bytes of stored KV now.",
    "budget_bytes": "Bytes that stored KV may have at most; beyond that the least used is evicted.",
    "hits": "Chunks of requests whose KV was found here.",
    "evictions": "Chunks whose KV was removed to make room.",
}
STORE_COUNTERS = {
    "misses": "Chunks of requests whose KV was nowhere and had to be computed.",
    "damaged": "Stored KV that was not what had been written, and was set aside.",
    "failed_writes": "KV that could not be written to the disk.",
}
REMOTE_COUNTERS = {
    "hits": "entries that requests found there",
    "misses": "entries that were looked up and not there",
    "failures": "calls that were not answered, or too late",
    "damaged": "entries whose bytes were not what was written",
    "read_bytes": "bytes that came",
    "sent_bytes": "bytes that were written",
    "dropped_writes": "changes that were not made",
}


class Metrics(Collector):
    """Counters of one server's requests, in a registry of their own, and the state of scheduler and stores when it is asked."""

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model
        self._scraping, self._scraped, self._scrape = asyncio.Lock(), 0.0, b""

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, labels, registry=self._registry)

        def histogram(name: str, documentation: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(name, documentation, labels, registry=self._registry, buckets=buckets)

        about = {"version": __version__, "torch": version("torch"), "model": model}
        Info("cacheblend_build", "Versions of the service and of PyTorch, and the model.", registry=self._registry).info(about)
        ProcessCollector(registry=self._registry)
        self._requests = counter("cacheblend_requests", "Requests that ended, and how.", "method", "outcome")
        ttft = "Time to first token: from question and chunks in hand, waiting for other requests included."
        self._ttft_s = histogram("cacheblend_ttft_seconds", ttft, SECONDS, "method")
        per_token = "Mean time between the tokens of an answer, after its first one."
        self._token_s = histogram("cacheblend_time_per_output_token_seconds", per_token, TOKEN_SECONDS)
        self._queue_s = histogram("cacheblend_queue_seconds", "Time that requests waited before their prefill began.", SECONDS)
        tokens = "Tokens of prompts, of them those reused and recomputed, and tokens generated."
        self._tokens = counter("cacheblend_tokens", tokens, "kind")
        self._chunks = counter("cacheblend_chunks", "Chunks of prompts, by the tier that their KV came from.", "source")
        self._loaded = counter("cacheblend_loaded_bytes", "Bytes of stored KV that requests loaded, by tier.", "tier")
        self.errors = counter("cacheblend_http_errors", "Responses of status 400 and above, and failed streams.", "status")
        labels = "namespace", "model"
        evaluations = "Sampled requests that full prefill answered too, to compare: compared, or failed."
        self._evaluations = counter("cacheblend_shadow_evaluations", evaluations, *labels, "outcome")
        self._guard = {
            name: histogram(f"cacheblend_guard_{name}", documentation, buckets, *labels)
            for name, (documentation, buckets) in GUARD_HISTOGRAMS.items()
        }

    def observe(self, request: Request, how: Done | Failed | None) -> None:
        """Count a request that ended; `Scheduler` calls it."""
        if isinstance(how, Done):
            self._tokens.labels("generated").inc(tokens := len(how.answer.token_ids))
            if tokens > 1:
                self._token_s.observe(how.answer.timings.decode_s / (tokens - 1))
        if request.leader is not None:  # another choice of a request that is counted
            return
        method = request.method
        if not isinstance(how, Done):
            self._requests.labels(method, "cancelled" if how is None else "failed").inc()
            return
        plan = how.answer.plan
        self._requests.labels(method, how.finish_reason).inc()
        self._ttft_s.labels(method).observe(how.answer.timings.ttft_s)
        self._queue_s.observe(how.queue_s)
        stored = sum(len(one.token_ids) for one in plan.segments if one.kind == "reused" and one.tier is not None)
        self._tokens.labels("prompt").inc(plan.prompt_tokens)
        self._tokens.labels("reused").inc(max(0.0, stored - plan.recomputed_tokens))
        self._tokens.labels("recomputed").inc(plan.recomputed_tokens)
        for segment in plan.segments:
            if segment.key is not None:
                self._chunks.labels(segment.tier or "computed").inc()
        for tier, loaded in plan.loaded_bytes.items():
            self._loaded.labels(tier).inc(loaded)

    def observe_shadow(self, tenant: str, comparison: Comparison | None) -> None:
        """Count a shadow evaluation by the tenant's name and the model, never by a salt; `Scheduler` calls it."""
        labels = tenant, self._model
        self._evaluations.labels(*labels, "failed" if comparison is None else "compared").inc()
        for name, histogram in self._guard.items() if comparison is not None else ():
            histogram.labels(*labels).observe(getattr(comparison, name))

    def watch(self, scheduler: Scheduler, engines: Iterable[Engine]) -> None:
        """Also export the state of scheduler and stores, as it is when asked."""
        self._scheduler, self._engines = scheduler, tuple(engines)
        self._registry.register(self)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    async def scrape(self) -> bytes:
        """`text`, made in a thread, once for all who asked before its making began."""
        came = time.perf_counter()
        async with self._scraping:
            if self._scraped < came:
                self._scraped, self._scrape = time.perf_counter(), await run_in_threadpool(self.text)
            return self._scrape

    def collect(self) -> Iterator[Metric]:
        """The state now, summed over tenants."""
        requests = GaugeMetricFamily("cacheblend_requests_now", "Requests that wait or run now, by state.", labels=["state"])
        for state, count in self._scheduler.state._asdict().items():
            requests.add_metric([state], count)
        yield requests
        exact = GaugeMetricFamily("cacheblend_exact", "1 while every request runs exactly, for this reason.", labels=["reason"])
        for reason in {engine.fusor.exact_reason for engine in self._engines}:
            if reason is not None:
                exact.add_metric([reason], 1)
        yield exact
        stores = [engine.store.stats() for engine in self._engines]
        for name, what in TIER_METRICS.items():
            family = CounterMetricFamily if name in ("hits", "evictions") else GaugeMetricFamily
            metric = family(f"cacheblend_store_{name}", what, labels=["tier"])
            for tier in ("ram", "nvme"):
                metric.add_metric([tier], sum(getattr(getattr(store, tier), name) for store in stores))
            yield metric
        for name, what in STORE_COUNTERS.items():
            total = sum(getattr(store, name) for store in stores)
            yield CounterMetricFamily(f"cacheblend_store_{name}", what, value=total)
        counts = [(engine.retriever.count(), engine.retriever.chunk_count) for engine in self._engines]
        documents, chunks = map(sum, zip(*counts, strict=True))
        what = "Documents that are answered from; each page, slide or sheet of a file is one."
        yield GaugeMetricFamily("cacheblend_indexed_documents", what, documents)
        yield GaugeMetricFamily("cacheblend_indexed_chunks", "Chunks of those documents.", chunks)
        remotes = [store.remote for store in stores if store.remote is not None]
        for name, what in REMOTE_COUNTERS.items() if remotes else ():
            total = sum(getattr(remote, name) for remote in remotes)
            yield CounterMetricFamily(f"cacheblend_remote_{name}", f"Remote tier: {what}.", value=total)
        if remotes:
            what = "Remote tiers that are not asked, since they do not answer."
            yield GaugeMetricFamily("cacheblend_remote_unavailable", what, sum(remote.state != "closed" for remote in remotes))
