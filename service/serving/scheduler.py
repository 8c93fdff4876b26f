"""The thread that owns the model: one layer of a prompt, one step of those that decode, and again."""

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch

from cacheblend.base.errors import DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.base.files import Closing
from cacheblend.blend import Fusor
from cacheblend.service.engine.request import Done, Failed, Request

from .config import ServingConfig
from .quality_guard import ShadowEvaluation, ShadowObserver

# Of the time while a prompt is prefilled. A step reads the weights once, for one sequence as for many: a step after every layer
# would double a short prompt's time, and fewer steps serve all the sequences that were prefilled meanwhile.
DECODE_SHARE = 0.25
TENANT_PLACES = 0.75  # of all places that one of several tenants may have, so that another tenant's request finds one
SHADOW_AFTER_S = 0.25  # without a request: a client that asks one question after the other does not wait for a check's layer
FIRST_PREFILL_S = 0.5  # a guess for Retry-After, before the first prompt
TURN_S = 1.0  # after which a prompt that is not prefilled waits for other tenants' turns and its own's shortest prompt
LAYERS_AHEAD = 2  # that are launched on the device and have not run: enough for a device that is never idle
logger = logging.getLogger(__name__)
Observer = Callable[[Request, Done | Failed | None], None]


def late_error(deadline_s: float) -> DeadlineError:
    """The error of a request that is older than `deadline_s`."""
    return DeadlineError(f"no answer within deadline_s={deadline_s:g}; ask for less, or later")


def stopping_error() -> ShuttingDownError:
    """The error of what comes while the service stops."""
    return ShuttingDownError("the service is shutting down; ask another one, or later")


class HasTenant(Protocol):
    """A request as turns see it."""

    @property
    def tenant(self) -> str:
        """Who asks."""


_Waiting = TypeVar("_Waiting", bound=HasTenant)


class Turns:
    """Round robin between tenants: the one that was served longest ago is next. Not thread-safe."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last_turn: defaultdict[str, int] = defaultdict(int)  # by tenant

    def take(self, waiting: list[_Waiting], may: Callable[[_Waiting], bool] = lambda _: True) -> _Waiting | None:
        """Remove the first request of the tenant whose turn it is, and return it.

        Args:
            waiting: requests, each tenant's in their order.
            may: whether a request may have a turn now.

        Returns:
            The request; None if there is none that may.
        """
        request = min(filter(may, waiting), key=lambda one: self._last_turn[one.tenant], default=None)
        if request is not None:
            self._last_turn[request.tenant] = next(self._turns)
            waiting.remove(request)
        return request


class DeviceClock:
    """Clock of a device whose work a host launches ahead of it; holds the host at most `LAYERS_AHEAD` layers ahead.

    So a decoding step waits for no more than those.

    Args:
        mark: notes the present moment in the device's order, as a `torch.cuda.Event` that can be waited for; None on a device
            that has run what was called.
    """

    def __init__(self, mark: Callable[[], Any] | None) -> None:
        self._mark = mark
        self._layers: deque[Any] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """The clock of a device's current stream, or of the CPU."""
        return cls((lambda: torch.cuda.current_stream(device).record_event()) if device.type == "cuda" else None)

    def launched_layer(self) -> None:
        """A layer was launched; wait for an earlier one if too many have not run."""
        if self._mark is not None:
            self._layers.append(self._mark())
            if len(self._layers) > LAYERS_AHEAD:
                self._layers.popleft().synchronize()

    def now(self) -> float:
        """Wait until everything that was launched has run; `time.perf_counter` then."""
        if self._mark is not None:
            self._mark().synchronize()
            self._layers.clear()
        return time.perf_counter()


class SchedulerState(NamedTuple):
    """Numbers of requests that wait, are prefilled, and decode."""

    waiting: int
    prefilling: int
    decoding: int


class Scheduler(Closing):
    """Serves requests on one model. Thread-safe; a context manager.

    One prompt is prefilled at a time, since two at once would both come later. Tenants take turns, a prompt each, or `TURN_S`
    of a long one, which then yields to its tenant's shortest, too. Between two layers the requests that decode take a step,
    `DECODE_SHARE` of the time. A request that ends, fails, is cancelled or is late leaves before the next step, and frees
    everything that it held. If nothing has run or waited for `SHADOW_AFTER_S`, sampled requests are compared with full prefill,
    a layer at a time.

    Args:
        fusor: the model that all requests' engines share.
        config: limits.
        observer: called with every request that ends, and how; None if it was cancelled. Must return at once.
        shadow_observer: of every shadow evaluation.
        several_tenants: whether `TENANT_PLACES` holds.
    """

    def __init__(
        self,
        fusor: Fusor,
        config: ServingConfig | None = None,
        observer: Observer = lambda *_: None,
        shadow_observer: ShadowObserver = lambda *_: None,
        *,
        several_tenants: bool = False,
    ) -> None:
        self.config = config or ServingConfig()
        places = self.config.max_num_seqs
        self._tenant_places = max(1, int(places * TENANT_PLACES)) if several_tenants else places
        self._fusor, self._observer = fusor, observer
        self._changed = threading.Condition()
        self._waiting: list[Request] = []  # each tenant's in their order
        self._turns = Turns()
        self._running: list[Request] = []
        self._prompt: Request | None = None  # that has its turn; others that are not prefilled wait again
        self._turn_ends = 0.0
        self._shadow = ShadowEvaluation(self.config, shadow_observer)
        self._closing = self._aborted = False
        self._prefill_s = FIRST_PREFILL_S  # a running mean, for Retry-After
        self._device = DeviceClock.of(fusor.decoder.device)
        self._next_decode = self._stepped = self._left = time.perf_counter()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request; its events come from the scheduler's thread.

        Raises:
            QueueFullError: its tenant has `max_waiting` requests waiting.
            ShuttingDownError: the scheduler is closing.
        """
        with self._changed:
            self.check_room(request.tenant)
            if not self.is_busy:
                self._stepped = time.perf_counter()
            request.submitted = time.perf_counter()
            self._waiting.append(request)
            self._changed.notify_all()

    def check_room(self, tenant: str, preparing: int = 0) -> None:
        """Refuse a request before it is prepared, if `submit` would refuse it.

        Args:
            tenant: who asks.
            preparing: requests of the tenant that are being prepared, and will wait.
        """
        if self._closing:
            raise stopping_error()
        with self._changed:
            waiting = preparing + sum(request.tenant == tenant for request in self._waiting)
        if waiting >= self.config.max_waiting:
            why = f"{waiting} requests wait already (max_waiting={self.config.max_waiting})"
            raise QueueFullError(why, waiting * self._prefill_s)

    @property
    def state(self) -> SchedulerState:
        """Numbers of requests by what they do now."""
        with self._changed:
            decoding = sum(running.decoding is not None for running in self._running)
            waiting = sum(request not in self._running for request in self._waiting)
            return SchedulerState(waiting, len(self._running) - decoding, decoding)

    def quality(self, tenant: str) -> dict[str, Any]:
        """How a tenant's blended prompts compare with full prefill; see `ShadowEvaluation.status`."""
        return self._shadow.status(tenant)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._closing

    @property
    def is_busy(self) -> bool:
        """Whether a request runs or waits."""
        with self._changed:
            return bool(self._running or self._waiting)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last step ended; 0 if nothing runs or waits."""
        with self._changed:
            return time.perf_counter() - self._stepped if self.is_busy else 0.0

    def stop(self) -> None:
        """Accept no more requests; those that came go on."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Give up every request, before the next step."""
        self._aborted = True

    def close(self) -> None:
        """Accept no more requests, and give up those that have not ended after `grace_s`; a second call does nothing."""
        self.stop()
        if not self._aborted:
            self._thread.join(self.config.grace_s)
        self.abort()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._serve()
        except Exception:  # a fault of this file; no client may wait for an answer that will not come
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
                self._changed.wait_for(lambda: self._closing or self.is_busy or self._shadow.has_work)
                pause_s = self._left + SHADOW_AFTER_S - time.perf_counter()
                self._changed.wait_for(lambda: self._closing or self.is_busy, max(0.0, pause_s))
                busy = self.is_busy
                if self._closing and not busy:
                    return
                self._stepped = time.perf_counter()
            if not busy:
                self._shadow.step()
                continue
            # 2. Let go of requests that are cancelled, late or given up.
            self._drop_ended()
            # 3. If the prompt's turn is over, take that of the next tenant.
            if self._prompt is None or time.perf_counter() >= self._turn_ends:
                self._next_prompt()
            # 4. Run one layer of it.
            if self._prompt is not None:
                self._prefill(self._prompt)
            # 5. Run one step of all that decode, unless a prompt is prefilled and their share of the time is used up.
            if self._prompt is None or time.perf_counter() >= self._next_decode:
                self._decode()

    def _drop_ended(self) -> None:
        with self._changed:
            requests = dict.fromkeys([*self._waiting, *self._running])
        for request in requests:
            if request.cancelled:
                self._leave(request, None)
            elif self._aborted:
                self._leave(request, Failed(ShuttingDownError("the service stopped before the answer was complete")))
            elif time.perf_counter() - request.asked.arrived > self.config.deadline_s:
                self._leave(request, Failed(late_error(self.config.deadline_s)))

    def _next_prompt(self) -> None:
        """Begin, or go on with, the prompt of the tenant whose turn it is; a new one needs a place."""
        places = Counter(running.tenant for running in self._running)

        def may(request: Request) -> bool:
            has_place = len(self._running) < self.config.max_num_seqs and places[request.tenant] < self._tenant_places
            return has_place or request in self._running

        self._turn_ends = time.perf_counter() + TURN_S
        with self._changed:
            if self._prompt is not None:
                self._wait_again(self._prompt)
            self._prompt = request = self._turns.take(self._waiting, may)
            if request is None or request in self._running:
                return
            self._running.append(request)
        try:
            self._shadow.admit(request)
            request.begin()
        except Exception as error:
            self._leave(request, Failed(error))

    def _wait_again(self, prompt: Request) -> None:
        """Put the prompt whose turn is over before its tenant's others, but after a shorter one and its followers."""
        own = [one for one in self._waiting if one.tenant == prompt.tenant]
        shortest = min(own, key=lambda one: len(one.prompt), default=prompt)
        self._waiting.insert(0, prompt)
        if len(shortest.prompt) < len(prompt.prompt):
            first = shortest.leader or shortest
            self._waiting.sort(key=lambda one: (one.leader or one) is not first)

    def _prefill(self, running: Request) -> None:
        def run_layer() -> bool:
            complete = running.prefill_layer()
            self._device.launched_layer()
            return complete

        self._advance(running, run_layer)
        if running.decoding is not None:
            self._prefill_s += 0.2 * (time.perf_counter() - running.begun - self._prefill_s)
            self._prompt = None

    def _decode(self) -> None:
        batch = [running for running in self._running if running.decoding is not None]
        if not batch:
            return
        began = self._device.now()
        self._step(batch)
        ended = self._device.now()
        self._next_decode = ended + (1 / DECODE_SHARE - 1) * (ended - began)

    def _step(self, batch: list[Request]) -> None:
        try:
            logits_RV = self._fusor.decoder.decode([running.last_token for running in batch], [running.kv for running in batch])
        except Exception as error:  # some layers may have appended the token and others not, so no sequence can go on
            for running in batch:
                self._leave(running, Failed(error))
            return
        for running, logits_V in zip(batch, logits_RV, strict=True):
            self._advance(running, partial(running.decode, logits_V))

    def _advance(self, running: Request, step: Callable[[], bool]) -> None:
        """Run a step of a request, which leaves if its answer is complete with that, or the step fails."""
        try:
            how: Done | Failed | None = running.finish() if step() else None
        except Exception as error:
            how = Failed(error)
        if how is not None:
            self._leave(running, how)

    def _leave(self, request: Request, how: Done | Failed | None) -> None:
        request.end()
        self._shadow.leave(request, answered=isinstance(how, Done))
        with self._changed:
            self._running = [running for running in self._running if running is not request]
            self._waiting = [waiting for waiting in self._waiting if waiting is not request]
            if request is self._prompt:
                self._prompt = None
            self._left = time.perf_counter()
        if isinstance(how, Failed):
            logger.warning("a request failed: %s: %s", type(how.error).__name__, how.error)
        try:
            self._observer(request, how)
        except Exception:  # the client has its answer all the same
            logger.exception("the observer of requests failed")
        try:
            if how is not None:
                request.deliver(how)
        except Exception:  # the client's loop may be gone; the other requests go on
            logger.exception("the end of a request was not delivered")
