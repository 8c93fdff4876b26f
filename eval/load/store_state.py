"""What a service of ours tells of its store between two steps."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from cacheblend.base.errors import ServiceError

from .target import Target

LOOK_EVERY_S = 0.2


async def settled_evictions(client: httpx.AsyncClient, target: Target) -> int | None:
    """Wait until nothing is computed or written behind the requests any more, and give the entries that were evicted from NVMe.

    What one step leaves to be done would otherwise be done beside the next target's.

    Returns:
        Evictions since the service started; None for another server, which does not tell.

    Raises:
        ServiceError: it does not answer.
    """
    if target.method is None:
        return None
    while True:
        store = await _store(client, target)
        if not (store["holes"] or store["pending_writes"]):
            return int(store["nvme"]["evictions"])
        await asyncio.sleep(LOOK_EVERY_S)


async def _store(client: httpx.AsyncClient, target: Target) -> dict[str, Any]:
    url = f"{target.address}/v1/store"
    try:
        response = await client.get(url, headers=target.headers)
        response.raise_for_status()
        store: dict[str, Any] = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServiceError(f"{url} does not answer: {error}") from error
    return store
