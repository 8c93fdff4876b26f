"""Counters of what was blended and what was not, in vLLM's log and on its metrics page."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

EXACT = "exact:"
TOKENS = ("hit_tokens", "missed_tokens", "recomputed_tokens")


class BlendStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Counts of an interval, by name; see `BlendScheduler.counts`."""

    data: dict[str, int]

    def reset(self) -> None:
        """Start a new interval."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Values of the log line."""
        return {f"cacheblend {name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class BlendMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # see above
    """`cacheblend_vllm_requests_total` by outcome, and `cacheblend_vllm_tokens_total` by kind."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._requests = counter(
            "cacheblend_vllm_requests",
            'Marked requests: outcome "blended", or "exact" with the reason why vLLM computed it.',
            labelnames=[*labelnames, "outcome", "reason"],
        )
        self._tokens = counter(
            "cacheblend_vllm_tokens",
            'Tokens of blended chunks: "hit" and "missed" in the store, "recomputed" a layer in the mean, question included.',
            labelnames=[*labelnames, "kind"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in TOKENS:
                self._tokens.labels(*labels, name.removesuffix("_tokens")).inc(count)
            else:
                outcome, _, reason = name.partition(":")
                self._requests.labels(*labels, outcome, reason).inc(count)
