"""One request as the client saw it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from cacheblend.eval.metrics.answers import quality

from .target import LoadRequest, Target

TOO_MANY_REQUESTS = 429
SHOWN_CHARACTERS = 200  # of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Outcome of a request; seconds run from the start of its rate's first arrival process.

    Args:
        id: of the example.
        due_s: when it was to be sent.
        sent_s: when it was.
        end_s: when its last byte came.
        outcome: "answered", "rejected" (429) or "failed".
        detail: what was wrong; empty where it was answered.
        ttft_s: from `due_s` to the first piece of text (of an answer without any, to its end); None unless answered.
        prompt_tokens: as the server counts them; None where it does not tell.
        cached_tokens: those of them that it had cached; None where it does not tell.
        completion_tokens: as the server counts them; None where it does not tell.
        text: the answer.
        quality: of the answer, 0..1, by the first metric of its example's task; None unless answered.
    """

    id: str
    due_s: float
    sent_s: float
    end_s: float
    outcome: str
    detail: str = ""
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    quality: float | None = None


async def ask(
    client: httpx.AsyncClient, target: Target, request: LoadRequest, max_tokens: int, *, started: float, due_s: float
) -> Sample:
    """Send a request and read its stream; nothing is raised for what a server does.

    Args:
        client: sends it.
        target: to whom.
        request: what.
        max_tokens: of the answer.
        started: second 0, on `time.perf_counter`'s clock.
        due_s: when it was to be sent.
    """
    sent_s = time.perf_counter() - started
    seen = _Stream()

    def sample(outcome: str, detail: str = "", ttft_s: float | None = None, marked: float | None = None) -> Sample:
        return Sample(
            id=request.example.id,
            due_s=due_s,
            sent_s=sent_s,
            end_s=time.perf_counter() - started,
            outcome=outcome,
            detail=detail[:SHOWN_CHARACTERS],
            ttft_s=ttft_s,
            **seen.usage(),
            text=seen.text,
            quality=marked,
        )

    try:
        body = target.body(request, max_tokens)
        async with client.stream("POST", target.url, json=body, headers=target.headers) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                rejected = response.status_code == TOO_MANY_REQUESTS
                return sample("rejected" if rejected else "failed", f"{response.status_code} {said}")
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    seen.add(line.removeprefix("data:").strip(), time.perf_counter() - started)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        return sample("failed", f"{type(error).__name__}: {error}")
    if seen.error is not None or not seen.finished:
        return sample("failed", seen.error or "the stream ended before the answer did")
    ended = time.perf_counter() - started
    first_s = ended if seen.first_text_s is None else seen.first_text_s
    found = quality(request.example, target.wording.answer_in(seen.text))
    return sample("answered", ttft_s=first_s - due_s, marked=next(iter(found.values())))


class _Stream:
    """Reads the events of a streamed completion, chat or text."""

    def __init__(self) -> None:
        self.text = ""
        self.first_text_s: float | None = None
        self.finished = False
        self.error: str | None = None
        self._usage: dict[str, Any] = {}

    def add(self, data: str, at_s: float) -> None:
        """An event's data, and when it came."""
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = json.dumps(event["error"])
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            piece = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
            if piece and self.first_text_s is None:
                self.first_text_s = at_s
            self.text += piece or ""
            self.finished = self.finished or choice.get("finish_reason") is not None

    def usage(self) -> dict[str, int | None]:
        """Tokens as the server counts them."""
        details = self._usage.get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": self._usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "completion_tokens": self._usage.get("completion_tokens"),
        }


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
    known = [(prompt, cached) for prompt, cached in counted if prompt and cached is not None]
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
        hit_rate=sum(cached for _, cached in known) / sum(prompt for prompt, _ in known) if known else None,
        quality=float(np.mean(qualities)) if qualities else None,
        evictions=evictions,
        latest_send_s=max((sample.sent_s - sample.due_s for sample in samples), default=0.0),
    )


async def send_on_time(
    client: httpx.AsyncClient,
    target: Target,
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float],
    max_tokens: int,
    keep: Callable[[Sample], None],
) -> None:
    """Send each request at its moment, and wait for all answers.

    A closed loop would send less to a server that is slow, and measure it at a lower rate than was asked for.

    Args:
        client: without a limit of connections.
        target: whom to ask.
        requests: what.
        arrivals_s: when, rising, in seconds from now.
        max_tokens: of an answer.
        keep: called with every request as it ends; those that have not when this is cancelled are given up.
    """
    started = time.perf_counter()

    async def one(request: LoadRequest, due_s: float) -> None:
        keep(await ask(client, target, request, max_tokens, started=started, due_s=due_s))

    async with asyncio.TaskGroup() as tasks:
        for request, due_s in zip(requests, arrivals_s, strict=True):
            await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
            tasks.create_task(one(request, due_s))


def poisson_arrivals(rate_rps: float, count: int, seed: int) -> list[float]:
    """Moments, in seconds from the start, of a Poisson process: gaps are exponential with mean 1 / rate.

    Args:
        rate_rps: arrivals a second, in the mean.
        count: how many.
        seed: the same one gives the same moments, and at another rate the same ones stretched.
    """
    return [float(moment) for moment in np.random.default_rng(seed).exponential(1.0, count).cumsum() / rate_rps]
