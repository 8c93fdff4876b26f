"""Load: requests at random moments against servers; TTFT and throughput by server, method and arrival rate.

A request is a question over the passages of its case. Our own service is sent the passages as `documents`, with a method; any
other OpenAI-compatible server is sent one text. Before the measured requests every question is asked once with its passages in
reverse order: so every passage was met before, and no prompt was.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import httpx
import numpy as np

from cacheblend.base.errors import ConfigError, InputError

from .data import Example, Wording

PERCENTILES = (50, 90, 99)
LOOK_EVERY_S = 0.2
SHOWN_CHARACTERS = 200  # of an error
TEXTS = ("content", "reasoning_content", "reasoning")  # of an event
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A question, in the data set's words, over documents."""

    question: str
    documents: tuple[str, ...]

    @classmethod
    def from_example(cls, example: Example, wording: Wording, num_chunks: int) -> LoadRequest:
        """Make the request of an example, over its first `num_chunks` passages."""
        passages = (f"{passage.title}\n{passage.text}".strip() for passage in example.passages[:num_chunks])
        return cls(wording.question.format(question=example.question), tuple(passages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and how it is asked.

    Args:
        label: its name in the results.
        address: without `/v1`.
        model: the name that it serves.
        method: of our own service; None for another server, which is sent one text.
        api_key: sent as a bearer token.
    """

    label: str
    address: str
    model: str
    method: str | None = None
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def body(self, request: LoadRequest, max_tokens: int) -> dict[str, Any]:
        """The body of a streamed chat completion."""
        content, own = "\n\n".join([*request.documents, request.question]), dict[str, Any]()
        if self.method is not None:
            content = request.question
            own = {"method": self.method, "documents": [{"text": text} for text in request.documents]}
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **own,
        }


def own_targets(address: str, methods: Sequence[str], api_key: str | None = None) -> list[Target]:
    """List a target for each method of our own service.

    Raises:
        ConfigError: the service does not know a method.
        InputError: no CacheBlend service answers at the address.
    """
    model = _first_model(address, api_key)
    known = model.get("methods")
    if known is None:
        raise InputError(f"{address} is no CacheBlend service; give it as --peer NAME={address}")
    for method in methods:
        if method not in known:
            raise ConfigError("methods", method, f"of {', '.join(known)}")
    name = str(model["id"])
    return [Target(label=method, address=address, model=name, method=method, api_key=api_key) for method in methods]


def peer_target(label: str, address: str, api_key: str | None = None) -> Target:
    """Make the target of another OpenAI-compatible server, with the first model that it names.

    Raises:
        InputError: no server answers at the address.
    """
    return Target(label=label, address=address, model=str(_first_model(address, api_key)["id"]), api_key=api_key)


def _first_model(address: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(f"{address}/v1/models", headers=headers, timeout=30)
        response.raise_for_status()
        model: dict[str, Any] = response.json()["data"][0]
        model["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{address}/v1/models names no model ({error}); give an OpenAI-compatible server's address") from error
    return model


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request as the client saw it; seconds since the first arrival of its rate.

    Args:
        due_s: when it was to be sent.
        end_s: when its last byte came.
        ttft_s: from `due_s` to the first text; None if it was not answered.
        error: what was wrong; empty if it was answered.
        usage: tokens as the server counts them.
    """

    due_s: float
    end_s: float = 0.0
    ttft_s: float | None = None
    error: str = ""
    usage: dict[str, Any] | None = None

    def read(self, event: dict[str, Any], now_s: float) -> bool:
        """Note an event of the stream, and return whether it ends the answer.

        Raises:
            ValueError: the event is an error.
        """
        if "error" in event:
            raise ValueError(event["error"])
        self.usage = event.get("usage") or self.usage
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        is_end = choice.get("finish_reason") is not None
        if self.ttft_s is None and (is_end or any(map((choice.get("delta") or {}).get, TEXTS))):
            self.ttft_s = now_s - self.due_s
        return is_end


async def ask(
    client: httpx.AsyncClient, target: Target, request: LoadRequest, max_tokens: int, started: float, due_s: float
) -> Sample:
    """Send a request when it is due and read its stream; whatever a server does, nothing is raised.

    Args:
        client: sends the request.
        target: the server.
        request: the question.
        max_tokens: of the answer.
        started: second 0, on `time.perf_counter`'s clock.
        due_s: when the request is due.
    """
    await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
    sample, has_ended = Sample(due_s=due_s), False
    try:
        body, url = target.body(request, max_tokens), f"{target.address}/v1/chat/completions"
        async with client.stream("POST", url, json=body, headers=target.headers) as response:
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"{response.status_code} {(await response.aread()).decode(errors='replace')}")
            received = b""  # `aiter_lines` would split at U+2028 too, which JSON may hold
            async for block in response.aiter_bytes():
                *lines, received = (received + block).split(b"\n")
                for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
                    has_ended |= data != b"[DONE]" and sample.read(json.loads(data), time.perf_counter() - started)
        if not has_ended:
            raise ValueError("the stream ended before the answer did")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        sample.error = f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
        sample.ttft_s = None
    sample.end_s = time.perf_counter() - started
    return sample


def poisson_arrivals(rate_rps: float, count: int, seed: int) -> list[float]:
    """Draw the seconds of a Poisson process's arrivals, the first at 0; the rate only stretches the process."""
    draw = random.Random(seed)
    return [0.0, *accumulate(draw.expovariate(1.0) / rate_rps for _ in range(count - 1))]


def summarize_rate(target: str, rate_rps: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """Sum up a target's requests at one rate; percentiles are over the answered ones, None if there are none."""
    answered = [sample for sample in samples if not sample.error]
    ttft_s = [sample.ttft_s for sample in answered if sample.ttft_s is not None]
    percentiles = np.percentile(ttft_s, PERCENTILES).tolist() if ttft_s else [None] * len(PERCENTILES)
    usages = [sample.usage for sample in answered if sample.usage]
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    prompt = sum(usage.get("prompt_tokens") or 0 for usage in usages)
    elapsed_s = max((sample.end_s for sample in answered), default=0.0)
    return {
        "target": target,
        "rate_rps": rate_rps,
        "requests": len(samples),
        "answered": len(answered),
        "first_error": next((sample.error for sample in samples if sample.error), None),
        **{f"ttft_s_p{percentile}": value for percentile, value in zip(PERCENTILES, percentiles, strict=True)},
        "throughput_rps": len(answered) / elapsed_s if elapsed_s else 0.0,
        "cached_share": cached / prompt if prompt else None,
        "samples": [asdict(sample) for sample in samples],
    }


async def _settle(client: httpx.AsyncClient, target: Target) -> None:
    """Wait until our own service has nothing more to compute or write."""
    while target.method is not None:
        store = (await client.get(f"{target.address}/v1/store", headers=target.headers)).raise_for_status().json()
        if not (store["precomputes_waiting"] or store["pending_writes"]):
            return
        await asyncio.sleep(LOOK_EVERY_S)


async def run_load(
    targets: Sequence[Target],
    requests: Sequence[LoadRequest],
    rates_rps: Sequence[float],
    *,
    max_tokens: int,
    timeout_s: float,
    seed: int = 0,
    on_progress: Progress = lambda *_: None,
) -> list[dict[str, Any]]:
    """Ask every target all requests, a share of them at each rate, after the warm-up; a summary for each target and rate.

    Raises:
        ConfigError: there are fewer requests than rates, or a rate that is not above 0.
    """
    if not rates_rps or min(rates_rps) <= 0:
        raise ConfigError("rates", ",".join(map(str, rates_rps)), "at least one, all above 0")
    count = len(requests) // len(rates_rps)
    if count < 1:
        raise ConfigError("cases", len(requests), f"at least one for each of {len(rates_rps)} rates")
    steps: list[dict[str, Any]] = []
    async with httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=None)) as client:
        for target in targets:
            for number, request in enumerate(requests):
                await ask(client, target, replace(request, documents=request.documents[::-1]), 1, time.perf_counter(), 0.0)
                on_progress(f"{target.label}: warm-up", number + 1, len(requests))
            for number, rate_rps in enumerate(rates_rps):
                with suppress(httpx.HTTPError):  # whose request says it
                    await _settle(client, target)
                own, started = requests[number * count : (number + 1) * count], time.perf_counter()
                due = poisson_arrivals(rate_rps, count, seed)
                asked = (ask(client, target, each, max_tokens, started, at) for each, at in zip(own, due, strict=True))
                steps.append(summarize_rate(target.label, rate_rps, await asyncio.gather(*asked)))
                on_progress(f"{target.label}: rates", number + 1, len(rates_rps))
    return steps
