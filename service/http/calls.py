"""Work for a request in a pool of threads: awaited without a thread, given up with its client, late ones refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from cacheblend.base.errors import ClientGoneError, ServiceError

from ..serving import Call, CallPool, Check
from .errors import ApiError
from .server import Server

LOOK_FOR_CLIENT_S = 0.5  # how often a request that waits is checked for its client
_Result = TypeVar("_Result")


def arrived(request: Request) -> float:
    """When a request came, in seconds of `time.perf_counter`; its deadline counts from then."""
    return float(getattr(request.state, "arrived", None) or time.perf_counter())


async def run_call(
    pool: CallPool, request: Request, work: Callable[[Check], _Result], *, cache_salt: str = "", until_begun: bool = False
) -> _Result:
    """Have work done for a request, and wait for it as long as its client does.

    Args:
        pool: where.
        request: whose tenant takes its turn, and whose client may go.
        work: see `Call`.
        cache_salt: of the request; salts of a tenant take turns.
        until_begun: the deadline is for the beginning of the work alone.

    Raises:
        QueueFullError, ShuttingDownError: see `CallPool.submit`.
        DeadlineError: it came longer ago than `deadline_s`.
        ApiError: 499, the client has gone; the work ends at its next check.
    """
    server: Server = request.app.state.server
    call = Call(
        work,
        tenant=getattr(request.state, "tenant", ""),
        cache_salt=cache_salt,
        deadline_s=server.scheduler.config.deadline_s,
        arrived=arrived(request),
        until_begun=until_begun,
    )
    pool.submit(call)
    waiting = asyncio.wrap_future(call.future)
    why: ServiceError = ClientGoneError("the client went away")
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=LOOK_FOR_CLIENT_S)
            if waiting.done():
                break
            if await request.is_disconnected():
                raise ApiError(499, str(why))  # nobody reads it; the log does
            if (late := call.over) is not None:
                why = late
                raise late
    except BaseException:  # the server cancels what waits when it is closed
        waiting.cancel()
        pool.leave(call, why)
        raise
    return waiting.result()
