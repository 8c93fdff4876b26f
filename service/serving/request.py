"""A request as the scheduler holds it, and what comes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from cacheblend.service.engine.engine import Engine
from cacheblend.service.engine.request import Answer, Request


@dataclass(frozen=True, slots=True)
class Piece:
    """A token was drawn; `text` is what became certain with it, perhaps nothing."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The request is answered.

    Args:
        answer: the whole answer; in its timings TTFT and prefill include the time in the queue and the turns of others.
        finish_reason: "stop" (end of sequence or a stop string) or "length".
        rest: text that was held back until now.
        queue_s: seconds that the request waited before its prefill began.
        deviation_N: each prompt token's KV deviation where it was measured (paper §4.1), 0 elsewhere.
    """

    answer: Answer
    finish_reason: str
    rest: str
    queue_s: float
    deviation_N: torch.Tensor = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer."""

    error: Exception


Event = Piece | Done | Failed


class ServedRequest:
    """A prepared request for the scheduler.

    Args:
        engine: whose documents and stored KV it uses; engines of one scheduler share their model.
        prepared: what `engine.prepare` gave.
        deliver: called from the scheduler's thread with every event, in order; `Done` or `Failed` is the last, unless the
            request was cancelled. Must return at once.
        tenant: who asks; tenants take turns.
        cache_salt: requests of another salt neither use nor fill the KV of this one's.
        seed: of the sampling.
        stop: strings that end the answer.
        arrived: seconds of `time.perf_counter`, when it came, which its deadline counts from; None for now.
        own_ratio: the caller chose the recompute ratio, so the quality guard neither raises it nor judges by the answer.
    """

    def __init__(
        self,
        engine: Engine,
        prepared: Request,
        deliver: Callable[[Event], None],
        *,
        tenant: str = "",
        cache_salt: str = "",
        seed: int | None = None,
        stop: Sequence[str] = (),
        own_ratio: bool = False,
        arrived: float | None = None,
    ) -> None:
        self.engine, self.prepared, self.deliver = engine, prepared, deliver
        self.tenant, self.cache_salt, self.seed, self.stop = tenant, cache_salt, seed, tuple(stop)
        self.own_ratio = own_ratio
        self.submitted = time.perf_counter()
        self.arrived = self.submitted if arrived is None else arrived
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for the answer any more: its next step frees all it holds, and no more events come."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()
