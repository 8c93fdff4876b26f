"""The thread that owns the model: one layer of a prefill, one step of the batch, and again; whose turn it is, by seconds of
the device.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import torch

from cacheblend.base.errors import DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.blend import Fusor

from .calls import FairQueue
from .config import ServingConfig
from .quality_guard import QualityStatus, ShadowEvaluation, ShadowReport
from .request import Done, Failed, ServedRequest

LAYERS_AHEAD = 2  # that are launched on the device and have not run: enough for one that is never idle
CREDIT_S = 0.25  # of the model's time that a tenant may be ahead of the others after a pause
GIVING_WAY = 4.0
SHADOW_AFTER_S = 0.25  # without a request: a client that asks one after the other does not wait for a check's layer
logger = logging.getLogger(__name__)
Observer = Callable[[ServedRequest, Done | Failed | None], None]


class PrefillTurns:
    """Gives the next layer to the tenant whose requests have had the least time (start-time fair queuing).

    Decoding counts: a step's time is that of the tenants whose sequences it took on, each by how many.

    A tenant that asked for nothing meanwhile has its next request prefilled at once, before those that ask all the time, up to
    `CREDIT_S` and no more: nobody saves up time in which the others would wait.
    """

    def __init__(self) -> None:
        self._had_s: dict[str, float] = {}
        self._now_s = 0.0  # what the tenant that was served last has had

    def enter(self, tenant: str) -> None:
        """A request of a tenant is prefilled from now on."""
        self._had_s[tenant] = max(self._had_s.get(tenant, 0.0), self._now_s - CREDIT_S)

    def next(self, tenants: Collection[str]) -> str:
        """Whose turn it is among tenants that have entered."""
        return min(tenants, key=self._had_s.__getitem__)

    def is_before(self, tenant: str, others: Collection[str]) -> bool:
        """Whether a tenant has had less than each of some others that have entered."""
        return all(self._had_s[tenant] < self._had_s[other] for other in others)

    def spend(self, tenant: str, seconds: float) -> None:
        """A layer of a tenant's request, or its part of a decoding step, took so long."""
        self._had_s[tenant] += seconds
        self._now_s = max(self._now_s, self._had_s[tenant])


class DecodePace:
    """Gives decoding its share of the time, and no more while somebody waits for a first token.

    A step costs about the same for one sequence as for many, since it reads the weights once: taken after every layer of a
    short prefill, steps serve one or two sequences each, and the prompt takes twice its time. Taken less often they serve all
    that were prefilled meanwhile.

    Args:
        share: of the time, above 0 and up to 1; with 1 a step follows every layer.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._ended_s = self._took_s = 0.0

    def is_due(self, now_s: float, *, gives_way: bool = False) -> bool:
        """Whether the share is not used up at this moment.

        Args:
            now_s: the moment.
            gives_way: the prefill is of a tenant that has had less than those that decode, who rest `GIVING_WAY` times as long.
        """
        return now_s >= self._ended_s + self._rest * self._took_s * (GIVING_WAY if gives_way else 1)

    def stepped(self, began_s: float, ended_s: float) -> None:
        """A step took from one moment to the other."""
        self._ended_s, self._took_s = ended_s, ended_s - began_s


class DeviceEvent(Protocol):
    """A moment in the order of what a device does, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Wait until it has come."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds to a later one; both have come."""


class HostEvent:
    """A moment on the CPU, where what was called has run: it has come."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """See `DeviceEvent`."""
        return True

    def synchronize(self) -> None:
        """See `DeviceEvent`."""

    def elapsed_time(self, end_event: Self) -> float:
        """See `DeviceEvent`."""
        return (end_event._at_s - self._at_s) * 1000


class DeviceClock:
    """Tells what each layer took on the device, and keeps the host at most `LAYERS_AHEAD` layers ahead of it.

    So a step of the batch that becomes due waits for no more than those. A wait is for one event of the current stream, behind
    which the device has more to do; copies on other streams go on, and nobody waits for them.

    Args:
        mark: notes the present moment in the device's order.
    """

    def __init__(self, mark: Callable[[], DeviceEvent]) -> None:
        self._mark = mark
        self._layers: deque[tuple[DeviceEvent, DeviceEvent, Callable[[float], None]]] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """The clock of a device's current stream, or of the CPU."""
        if device.type != "cuda":
            return cls(HostEvent)

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark)

    @contextmanager
    def measure(self, spend: Callable[[float], None]) -> Iterator[None]:
        """Measure what the block launches; `spend` is called with its seconds once it has run, here or in a later call."""
        began = self._mark()
        try:
            yield
        finally:
            self._layers.append((began, self._mark(), spend))
            while self._layers and (len(self._layers) > LAYERS_AHEAD or self._layers[0][1].query()):
                self._end_first()

    def now(self) -> float:
        """Seconds of `time.perf_counter` when all that was launched has run, and was spent."""
        self._mark().synchronize()
        while self._layers:
            self._end_first()
        return time.perf_counter()

    def _end_first(self) -> None:
        began, ended, spend = self._layers.popleft()
        ended.synchronize()
        spend(began.elapsed_time(ended) / 1000)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Numbers of requests that wait, are prefilled, and decode."""

    waiting: int
    prefilling: int
    decoding: int


class Scheduler:
    """Serves requests on one model. Thread-safe; a context manager.

    One request of a tenant is prefilled at a time, since two at once would both come later; tenants' prefills share the time,
    layer by layer. Between two layers the batch of those that decode takes a step where one is due (`DecodePace`). A request
    that ends, fails, is cancelled or is late leaves before the next step, and all it held is free then. Where nothing has run
    or waited for `SHADOW_AFTER_S`, sampled requests are held against full prefill, a layer at a time.

    Args:
        fusor: the model that all requests' engines share.
        config: limits.
        observer: called with every request that ends, and how; None where it was cancelled. Must return at once.
        shadow_observer: given a report of every shadow evaluation. Must return at once.
        several_tenants: none of them takes more than three quarters of the places, so that another's request finds one.
    """

    def __init__(
        self,
        fusor: Fusor,
        config: ServingConfig | None = None,
        observer: Observer = lambda *_: None,
        shadow_observer: Callable[[ShadowReport], None] = lambda _: None,
        *,
        several_tenants: bool = False,
    ) -> None:
        self.config = config or ServingConfig()
        places = self.config.max_num_seqs
        self._most_running = max(1, places - math.ceil(places / 4)) if several_tenants else places  # of one tenant
        self._fusor, self._observer = fusor, observer
        self._changed = threading.Condition()
        self._queue: FairQueue[ServedRequest] = FairQueue()
        self._running: list[ServedRequest] = []
        self._shadow = ShadowEvaluation(self.config, shadow_observer)
        self._pace = DecodePace(self.config.decode_share)
        self._closing = self._aborted = False
        self._prefill_s: dict[str, float] = {}  # a running mean by tenant, for Retry-After
        self._turns = PrefillTurns()
        self._device = DeviceClock.of(fusor.decoder.device)
        self._stepped = self._left_s = time.perf_counter()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: ServedRequest) -> None:
        """Have a request served; its events come from the scheduler's thread.

        Raises:
            QueueFullError: its tenant has `max_waiting` requests waiting.
            ShuttingDownError: the scheduler is closing.
        """
        with self._changed:
            self._check_room(request.tenant)
            if not self._is_busy():
                self._stepped = time.perf_counter()
            self._queue.put(request)
            self._changed.notify_all()

    def check_room(self, tenant: str, preparing: int = 0) -> None:
        """Refuse, as `submit` would, before a request is prepared for nothing.

        Args:
            tenant: who asks.
            preparing: requests of the tenant that are being prepared, each of which will wait.
        """
        with self._changed:
            self._check_room(tenant, preparing)

    def waiting(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        with self._changed:
            return self._queue.count(tenant)

    @property
    def state(self) -> SchedulerState:
        """What goes on now."""
        with self._changed:
            decoding = sum(running.is_prefilled for running in self._running)
            return SchedulerState(len(self._queue), len(self._running) - decoding, decoding)

    def quality(self, tenant: str) -> QualityStatus:
        """How a tenant's blended answers stand beside full prefill's."""
        return self._shadow.status(tenant)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._closing

    @property
    def is_busy(self) -> bool:
        """Whether a request runs or waits."""
        with self._changed:
            return self._is_busy()

    @property
    def stalled_s(self) -> float:
        """For how many seconds no step has ended; 0 where nothing runs or waits."""
        with self._changed:
            return time.perf_counter() - self._stepped if self._is_busy() else 0.0

    def stop(self) -> None:
        """Take no more requests; those that came go on."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Give up what runs and waits, before the next step."""
        self._aborted = True

    def close(self) -> None:
        """Take no more requests, finish what came within `grace_s`, give up the rest; a second call does nothing."""
        self.stop()
        if not self._aborted:
            self._thread.join(self.config.grace_s)
        self.abort()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_room(self, tenant: str, preparing: int = 0) -> None:
        if self._closing:
            raise ShuttingDownError("the service is shutting down; ask another one, or later")
        if (waiting := self._queue.count(tenant) + preparing) >= self.config.max_waiting:
            retry_after_s = max(1, math.ceil(waiting * self._prefill_s.get(tenant, 0.5)))
            raise QueueFullError(
                f"{waiting} requests wait already (max_waiting={self.config.max_waiting}); try again in {retry_after_s} s",
                retry_after_s,
            )

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:  # a fault of this file; nobody may wait for an answer that will not come
            logger.exception("the scheduler ended")
            with self._changed:
                self._closing = self._aborted = True
            self._drop_ended()
        finally:
            self._shadow.close()

    def _serve(self) -> None:
        while True:
            # 1. Wait for a request; while there is none, a shadow evaluation goes on, a layer or a token at a time.
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._is_busy() or self._shadow.has_work)
                pause_s = self._left_s + SHADOW_AFTER_S - time.perf_counter()
                self._changed.wait_for(lambda: self._closing or self._is_busy(), max(0.0, pause_s))
                busy = self._is_busy()
                if self._closing and not busy:
                    return
                self._stepped = time.perf_counter()
            if not busy:
                self._shadow.step()
                continue
            # 2. Let go of what is cancelled, late or given up.
            self._drop_ended()
            # 3. Begin what has a place.
            self._admit()
            # 4. One layer of one prefill.
            self._prefill()
            # 5. One step of all that decode, where their share of the time is not used up.
            self._decode()

    def _is_busy(self) -> bool:
        return bool(self._running) or len(self._queue) > 0

    def _drop_ended(self) -> None:
        """Let go of requests that are cancelled, late, or given up."""
        with self._changed:
            waiting = self._queue.remove(self._is_over)
        for request in waiting:
            self._report(request, self._why_over(request))
        for running in list(self._running):
            if self._is_over(running):
                self._leave(running, self._why_over(running))

    def _is_over(self, request: ServedRequest) -> bool:
        return request.cancelled or self._aborted or time.perf_counter() - request.arrived > self.config.deadline_s

    def _why_over(self, request: ServedRequest) -> Failed | None:
        if request.cancelled:
            return None
        if self._aborted:
            return Failed(ShuttingDownError("the service stopped before the answer was complete"))
        return Failed(DeadlineError(f"no answer within deadline_s={self.config.deadline_s:g}; ask for less, or later"))

    def _admit(self) -> None:
        while len(self._running) < self.config.max_num_seqs:
            if (request := self._take()) is None:
                return
            try:
                self._shadow.admit(request, sum(one.sampled for one in self._running))
                request.begin()
            except Exception as error:
                request.end()
                self._report(request, Failed(error))
                continue
            self._turns.enter(request.tenant)
            with self._changed:
                self._running.append(request)

    def _take(self) -> ServedRequest | None:
        """The next request of a tenant that has a place left, and none that is prefilled now."""
        places = Counter(running.tenant for running in self._running)
        prefilling = {running.tenant for running in self._running if not running.is_prefilled}
        with self._changed:
            return self._queue.take(lambda tenant: tenant not in prefilling and places[tenant] < self._most_running)

    def _prefill(self) -> None:
        """Run a layer of the request whose tenant's turn it is; see `PrefillTurns`."""
        prefilling = {running.tenant: running for running in self._running if not running.is_prefilled}
        if not prefilling:
            return
        tenant = self._turns.next(prefilling)
        running = prefilling[tenant]
        try:
            with self._device.measure(partial(self._spend, running)):
                complete = running.prefill_layer()
            if running.is_prefilled:
                self._device.now()  # all its layers count; on a GPU the first token has waited for them
        except Exception as error:
            self._leave(running, Failed(error))
            return
        if running.is_prefilled:
            mean_s = self._prefill_s.get(tenant, 0.5)
            self._prefill_s[tenant] = mean_s + 0.2 * (running.prefill_s - mean_s)
        if complete:
            self._finish(running)

    def _spend(self, running: ServedRequest, seconds: float) -> None:
        running.prefill_s += seconds
        self._turns.spend(running.tenant, seconds)

    def _decode(self) -> None:
        batch = [running for running in self._running if running.is_prefilled]
        if not batch:
            return
        sequences = Counter(running.tenant for running in batch)
        if prefilling := {running.tenant for running in self._running if not running.is_prefilled}:
            gives_way = self._turns.is_before(self._turns.next(prefilling), sequences)
            # By the host's clock: the device's would wait for the layer that was just launched.
            if not self._pace.is_due(time.perf_counter(), gives_way=gives_way):
                return
        began = self._device.now()
        self._step(batch)
        ended = self._device.now()
        self._pace.stepped(began, ended)
        for tenant, count in sequences.items():
            self._turns.spend(tenant, (ended - began) * count / len(batch))

    def _step(self, batch: list[ServedRequest]) -> None:
        try:
            logits_RV = self._fusor.decoder.decode([running.last_token for running in batch], [running.kv for running in batch])
        except Exception as error:  # some layers may have appended the token and others not: none of the KV is whole
            for running in batch:
                self._leave(running, Failed(error))
            return
        for running, logits_V in zip(batch, logits_RV, strict=True):
            try:
                complete = running.decode(logits_V)
            except Exception as error:
                self._leave(running, Failed(error))
                continue
            if complete:
                self._finish(running)

    def _finish(self, running: ServedRequest) -> None:
        try:
            how: Done | Failed = running.finish()
            if running.sampled:
                self._shadow.add(running)
        except Exception as error:
            how = Failed(error)
        self._leave(running, how)

    def _leave(self, running: ServedRequest, how: Done | Failed | None) -> None:
        running.end()
        with self._changed:
            self._running.remove(running)
            self._left_s = time.perf_counter()
        self._report(running, how)

    def _report(self, request: ServedRequest, how: Done | Failed | None) -> None:
        if isinstance(how, Failed):
            logger.warning("a request failed: %s: %s", type(how.error).__name__, how.error)
        try:
            self._observer(request, how)
            if how is not None:
                request.deliver(how)
        except Exception:  # the client's loop may be gone; the other requests go on
            logger.exception("the observer of requests failed")
