"""Requests sent when they are due, however long those before them take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from .request_set import LoadRequest
from .sample import Sample, ask
from .target import Target


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
        keep: told of every request as it ends; those that have not when this is cancelled are given up.
    """
    started = time.perf_counter()

    async def one(request: LoadRequest, due_s: float) -> None:
        keep(await ask(client, target, request, max_tokens, started=started, due_s=due_s))

    async with asyncio.TaskGroup() as tasks:
        for request, due_s in zip(requests, arrivals_s, strict=True):
            await asyncio.sleep(max(0.0, started + due_s - time.perf_counter()))
            tasks.create_task(one(request, due_s))
