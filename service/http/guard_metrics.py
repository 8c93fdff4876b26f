"""What the quality guard measures, for Prometheus, by tenant (namespace) and model."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ..serving import CheckReport

AGREEMENT = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
KL_NATS = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0)
RELATIVE_KV_ERROR = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)


class GuardMetrics:
    """Counts the checks of one server. The namespace is the tenant's name, empty without tenants; never a cache salt.

    Args:
        registry: of the server.
        model: its name.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        labels = ["namespace", "model"]
        self._checks = Counter(
            "cacheblend_guard_checks",
            "Sampled requests by what became of their check: compared, dropped, failed.",
            [*labels, "outcome"],
            registry=registry,
        )

        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            by_prefill = [*labels, "prefill"]
            return Histogram(f"cacheblend_guard_{name}", documentation, by_prefill, registry=registry, buckets=buckets)

        self._agreement = histogram("agreement", "Share of full prefill's first tokens that blending gives too.", AGREEMENT)
        self._kl = histogram(
            "first_token_kl_nats", "KL divergence of the first token's distribution, full from blended.", KL_NATS
        )
        self._deviation = histogram(
            "relative_kv_error", "Squared difference of the KV to full prefill's, over its squared size.", RELATIVE_KV_ERROR
        )
        self._least_ratio = Gauge(
            "cacheblend_guard_least_recompute_ratio",
            "Ratio that the guard holds blended requests to: 0 as planned, 1 full recompute.",
            labels,
            registry=registry,
        )

    def observe(self, report: CheckReport) -> None:
        """Count a check; `Scheduler` calls it."""
        labels = report.tenant, self._model
        self._checks.labels(*labels, report.outcome).inc()
        self._least_ratio.labels(*labels).set(report.level)
        for prefill, found in report.comparisons.items():
            self._agreement.labels(*labels, prefill).observe(found.agreement)
            self._kl.labels(*labels, prefill).observe(found.first_token_kl_nats)
            self._deviation.labels(*labels, prefill).observe(found.relative_kv_error)
