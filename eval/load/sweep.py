"""A whole load run: targets by turns at every rate, into a folder."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cacheblend.base.errors import ConfigError, InputError, ServiceError
from cacheblend.eval.data import RequestSource
from cacheblend.eval.run.folder import RunFolder, commit

from .report import equal_ttft
from .sample import Sample, Step, ask, poisson_arrivals, send_on_time, step_of
from .target import LoadRequest, Target, settled_evictions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings of a load run.

    Args:
        source: where the requests come from.
        rates_rps: arrivals a second, in the mean, each swept by every target.
        requests: requests of one rate; every rate has its own, and every target the same ones.
        warm_up: requests that each target gets before, one after the other and not measured; those that the source itself sets
            apart come in their place.
        max_tokens: most tokens of an answer.
        timeout_s: a request without a byte for so long has failed.
        seed: of the arrivals, and of the order of the documents that are ingested before.

    Raises:
        ConfigError: a value is not allowed.
    """

    source: RequestSource
    rates_rps: tuple[float, ...]
    requests: int = 50
    warm_up: int = 5
    max_tokens: int = 16
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates_rps or not all(math.isfinite(rate) and rate > 0 for rate in self.rates_rps):
            raise ConfigError("rates", self.rates_rps, "at least one number of requests a second, above 0")
        if len(set(self.rates_rps)) < len(self.rates_rps):
            raise ConfigError("rates", self.rates_rps, "each rate once")
        for name, least in (("requests", 1), ("warm_up", 0), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"at least {least}")
        if not math.isfinite(self.timeout_s) or self.timeout_s <= 0:
            raise ConfigError("timeout_s", self.timeout_s, "seconds, above 0")


Progress = Callable[[str, int, int], None]
DOCUMENTS_AT_ONCE = 100


def run_load(
    config: LoadConfig,
    targets: Sequence[Target],
    warm_up: Sequence[LoadRequest],
    by_rate: Sequence[Sequence[LoadRequest]],
    folder: Path,
    *,
    on_progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Sweep the rates over the targets and give the summary; rows and summary are in the folder as well.

    The first target is the reference of the table at equal TTFT. An interrupt (Ctrl-C) gives up what is under way and leaves
    the summary of what has ended, with `interrupted`.

    Args:
        config: rates, requests, seed.
        targets: whom to ask; at each rate one after the other.
        warm_up: requests that are not measured; see `split_requests`.
        by_rate: those of every rate.
        folder: new.
        on_progress: called with the stage, requests ended, and requests in all.

    Raises:
        InputError: a label twice, or a folder that exists.
        ServiceError: a target does not answer the warm-up, or our own service refuses the documents.
    """
    labels = [target.label for target in targets]
    if not labels or len(set(labels)) < len(labels):
        raise InputError(f"the targets are {labels}: give at least one, and each its own name")
    run = RunFolder.create(folder, _setup(config, targets))
    if config.source.caches_all:
        _ingest(targets, [request for group in (warm_up, *by_rate) for request in group], config.seed, on_progress)
    steps: list[Step] = []
    whole = asyncio.run(_sweep(config, targets, warm_up, by_rate, run, steps, on_progress))
    summary = {
        "run": str(folder),
        "data": config.source.name,
        "interrupted": not whole,
        "reference": labels[0],
        "steps": [dataclasses.asdict(step) for step in steps],
        "equal_ttft": equal_ttft(steps, labels[0]),
    }
    run.write_summary(summary)
    return summary


async def _sweep(
    config: LoadConfig,
    targets: Sequence[Target],
    warm_up: Sequence[LoadRequest],
    by_rate: Sequence[Sequence[LoadRequest]],
    run: RunFolder,
    steps: list[Step],
    on_progress: Progress,
) -> bool:
    """Run all steps; False where it was cancelled."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(config.timeout_s, pool=None)
    async with httpx.AsyncClient(limits=limits, timeout=timeout) as client:
        try:
            for target in targets:
                await _warm_up(client, target, warm_up, config.max_tokens, on_progress)
            for place, (rate_rps, requests) in enumerate(zip(config.rates_rps, by_rate, strict=True)):
                arrivals_s = poisson_arrivals(rate_rps, len(requests), config.seed + place)
                for target in targets:
                    await _step(client, target, rate_rps, requests, arrivals_s, config.max_tokens, run, steps, on_progress)
        except asyncio.CancelledError:
            return False
    return True


async def _warm_up(
    client: httpx.AsyncClient, target: Target, requests: Sequence[LoadRequest], max_tokens: int, on_progress: Progress
) -> None:
    for place, request in enumerate(requests, start=1):
        sample = await ask(client, target, request, max_tokens, started=time.perf_counter(), due_s=0.0)
        if sample.outcome != "answered":
            raise ServiceError(f"{target.label} at {target.url} does not answer a request of the warm-up: {sample.detail}")
        on_progress(f"{target.label}, warm-up", place, len(requests))


async def _step(
    client: httpx.AsyncClient,
    target: Target,
    rate_rps: float,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float],
    max_tokens: int,
    run: RunFolder,
    steps: list[Step],
    on_progress: Progress,
) -> None:
    samples: list[Sample] = []

    def keep(sample: Sample) -> None:
        samples.append(sample)
        on_progress(f"{target.label} at {rate_rps:g}/s", len(samples), len(requests))

    before, evictions = await settled_evictions(client, target), None
    try:
        await send_on_time(client, target, requests, arrivals_s, max_tokens, keep)
        after = await settled_evictions(client, target)
        evictions = None if before is None or after is None else after - before
    finally:  # cancelled or not
        for sample in samples:
            run.append({"target": target.label, "rate_rps": rate_rps, **dataclasses.asdict(sample)})
        if samples:
            steps.append(step_of(target.label, rate_rps, samples, evictions))


def _ingest(targets: Sequence[Target], requests: Sequence[LoadRequest], seed: int, on_progress: Progress) -> None:
    """Have our own services precompute every document, as the data set says that all were met before.

    They come in an order of their own: in that of the requests, a store that is too small for all would have evicted just what
    is asked for next.
    """
    texts = list(dict.fromkeys(document for request in requests for document in request.documents))
    random.Random(seed).shuffle(texts)
    for target in {target.address: target for target in targets if target.method is not None}.values():
        for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
            documents = [{"text": text} for text in texts[start : start + DOCUMENTS_AT_ONCE]]
            url = f"{target.address}/v1/documents"
            response = httpx.post(url, json={"documents": documents}, headers=target.headers, timeout=None)
            if response.is_error:
                raise ServiceError(f"{url} refuses the documents of the run: {response.text}")
            on_progress("ingest", start + len(documents), len(texts))


def _setup(config: LoadConfig, targets: Sequence[Target]) -> dict[str, Any]:
    described = [{**dataclasses.asdict(target), "api_key": None} for target in targets]
    return {
        "config": {**dataclasses.asdict(config), "source": {"name": config.source.name, **dataclasses.asdict(config.source)}},  # type: ignore[call-overload]  # every source is a dataclass
        "targets": described,
        "client": {"python": platform.python_version(), "processors": os.cpu_count(), "machine": platform.machine()},
        "commit": commit(),
    }
