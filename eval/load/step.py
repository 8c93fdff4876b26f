"""What one target made of one rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One target at one rate.

    Args:
        target: its label.
        rate_rps: arrivals a second that were asked for.
        requests: sent, and ended.
        answered: of those.
        rejected: of those: the server said 429.
        failed: of those, for any other reason.
        ttft_median_s: over the answered, from when a request was due to its first text; None where none was.
        ttft_p99_s: the same; with fewer than a hundred requests close to the largest.
        throughput_rps: answered requests over the seconds from the first arrival to the last answer.
        tokens_per_s: generated, over the same seconds; None where the server does not tell.
        hit_rate: cached prompt tokens over prompt tokens, of the answered; None where the server does not tell.
        quality: mean of the answered, 0..1, by the data set's first metric; None where none was answered.
        evictions: entries that left our store's NVMe tier meanwhile; None for another server.
        latest_send_s: how much too late the client sent a request at most; more than a few hundredths, and the client, not the
            server, was the limit.
    """

    target: str
    rate_rps: float
    requests: int
    answered: int
    rejected: int
    failed: int
    ttft_median_s: float | None
    ttft_p99_s: float | None
    throughput_rps: float
    tokens_per_s: float | None
    hit_rate: float | None
    quality: float | None
    evictions: int | None
    latest_send_s: float


def step_of(target: str, rate_rps: float, samples: Sequence[Sample], evictions: int | None = None) -> Step:
    """Sum up the requests of a step; there may be none."""
    answered = [sample for sample in samples if sample.outcome == "answered"]
    ttft_s = [sample.ttft_s for sample in answered if sample.ttft_s is not None]
    seconds = max((sample.end_s for sample in answered), default=0.0) - min((sample.due_s for sample in samples), default=0.0)
    counted = [(sample.prompt_tokens, sample.cached_tokens) for sample in answered]
    told = [(prompt, cached) for prompt, cached in counted if prompt and cached is not None]
    qualities = [sample.quality for sample in answered if sample.quality is not None]
    generated = [sample.completion_tokens for sample in answered if sample.completion_tokens is not None]
    return Step(
        target=target,
        rate_rps=rate_rps,
        requests=len(samples),
        answered=len(answered),
        rejected=sum(sample.outcome == "rejected" for sample in samples),
        failed=sum(sample.outcome == "failed" for sample in samples),
        ttft_median_s=float(np.percentile(ttft_s, 50)) if ttft_s else None,
        ttft_p99_s=float(np.percentile(ttft_s, 99)) if ttft_s else None,
        throughput_rps=len(answered) / seconds if answered else 0.0,
        tokens_per_s=sum(generated) / seconds if generated else None,
        hit_rate=sum(cached for _, cached in told) / sum(prompt for prompt, _ in told) if told else None,
        quality=float(np.mean(qualities)) if qualities else None,
        evictions=evictions,
        latest_send_s=max((sample.sent_s - sample.due_s for sample in samples), default=0.0),
    )
