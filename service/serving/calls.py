"""Calls of clients: they wait in turns of their tenants, and run in threads as long as their clients wait for them."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cacheblend.base.errors import QueueFullError
from cacheblend.base.threads import Check, lower_priority

from .scheduler import Turns, late_error, stopping_error

LOOK_EVERY_S = 0.02  # how often a pool that pauses looks whether it may go on
_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class Call(Generic[_Result]):
    """One client's call and its outcome. Thread-safe.

    Args:
        work: runs in a thread. It calls the `Check` that it is given between batches, which raises when nobody waits any more.
        tenant: who calls; tenants take turns.
        deadline_s: seconds from the call's arrival after which it is given up.
        arrived: `time.perf_counter` when the call came; now by default.
        until_begun: whether the deadline no longer holds once the work has begun.

    Attributes:
        future: the outcome.
        begun: `time.perf_counter` when its last batch began; None while it waits.
    """

    work: Callable[[Check], _Result]
    tenant: str = ""
    deadline_s: float = math.inf
    arrived: float = field(default_factory=time.perf_counter)
    until_begun: bool = False
    future: Future[_Result] = field(init=False, default_factory=Future)
    begun: float | None = field(init=False, default=None)
    _given_up: BaseException | None = field(init=False, default=None)

    def give_up(self, error: BaseException) -> None:
        """Answer with an error now, and end the work at its next check; the first error counts."""
        self._given_up = self._given_up or error
        with suppress(InvalidStateError):  # it is answered
            self.future.set_exception(error)

    def check(self) -> None:
        """Raise if the call was given up, or is late."""
        if self._given_up is not None:
            raise self._given_up
        has_deadline = self.begun is None or not self.until_begun
        if has_deadline and time.perf_counter() - self.arrived > self.deadline_s:
            raise late_error(self.deadline_s)

    def run(self, check: Check) -> None:
        """Do the work, and set its outcome, unless the call was given up meanwhile."""
        try:
            self.check()
            self.begun = time.perf_counter()
            outcome = self.work(check)
        except BaseException as error:  # the waiting client must see it, whatever it is
            self.give_up(error)
        else:
            with suppress(InvalidStateError):
                self.future.set_result(outcome)


class CallPool:
    """Runs calls of one kind in threads; a call that waits has no thread. Thread-safe.

    A thread ends with its call: PyTorch's own threads end with it (`base/threads.py`), and none keeps the process from exiting.

    Args:
        name: of the threads, and of the calls in messages.
        max_calls: of one tenant, waiting and running; the next one is refused.
        per_tenant: calls of one tenant that run at once; those that check run a batch each in turn.
        at_once: calls of all tenants that run at once.
        pauses_while: says whether requests run; while they do, the pool's calls work for `share` of the time together.
        share: above 0 to 1; below 1 the threads have a low priority (`lower_priority`).
    """

    def __init__(
        self,
        name: str,
        max_calls: int,
        *,
        per_tenant: int = 1,
        at_once: float = math.inf,
        pauses_while: Callable[[], bool] = lambda: False,
        share: float = 1.0,
    ) -> None:
        self._name, self._max_calls, self._per_tenant, self._at_once = name, max_calls, per_tenant, at_once
        self._pauses_while, self._share = pauses_while, share
        self._lock = threading.RLock()
        self._waiting: list[Call[Any]] = []
        self._running: dict[Call[Any], threading.Thread] = {}
        self._turns = Turns()
        self._batches: list[Call[Any]] = []  # that have checked, in the order in which each has its next batch
        self._batch_ended = threading.Condition(self._lock)
        self._mean_s = 1.0  # a running mean of a call's time, for Retry-After
        self._closing = False

    def submit(self, call: Call[Any]) -> None:
        """Queue a call; its `future` has the outcome.

        Raises:
            QueueFullError: its tenant has `max_calls` already.
            ShuttingDownError: the pool is closing.
        """
        with self._lock:
            if self._closing:
                raise stopping_error()
            if (own := self.count(call.tenant)) >= self._max_calls:
                raise QueueFullError(f"{own} {self._name} wait or run already", own * self._mean_s)
            self._waiting.append(call)
            self._start()

    def count(self, tenant: str) -> int:
        """Count a tenant's calls that wait or run."""
        with self._lock:
            return sum(call.tenant == tenant for call in (*self._waiting, *self._running))

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or runs."""
        with self._lock:
            return bool(self._waiting or self._running)

    @property
    def stalled_s(self) -> float:
        """Seconds since the last check of the call that checks least often; 0 if none runs."""
        with self._lock:
            begun = [call.begun for call in self._running if call.begun is not None]
        return time.perf_counter() - min(begun) if begun else 0.0

    def leave(self, call: Call[Any], error: BaseException) -> None:
        """Give a call up: one that waits is forgotten, one that runs ends at its next check."""
        call.give_up(error)
        with self._lock, suppress(ValueError):  # it has begun
            self._waiting.remove(call)

    def stop(self) -> None:
        """Accept no more calls, and refuse those that wait; those that run go on."""
        with self._lock:
            self._closing = True
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.give_up(stopping_error())

    def close(self, *, after_s: float = 0.0) -> None:
        """`stop`, wait until the calls that run have ended, and give them up after so many seconds."""
        self.stop()
        with self._lock:
            running = dict(self._running)
        wait([call.future for call in running], after_s)
        self.give_up()
        for thread in running.values():
            thread.join()

    def give_up(self) -> None:
        """`stop`, and give up the calls that run. Returns at once."""
        self.stop()
        with self._lock:
            running = list(self._running)
        for call in running:
            call.give_up(stopping_error())

    def _start(self) -> None:
        """Start the calls that may run; the lock is held."""
        running = Counter(call.tenant for call in self._running)
        while len(self._running) < self._at_once:
            call = self._turns.take(self._waiting, lambda call: running[call.tenant] < self._per_tenant)
            if call is None:
                return
            self._running[call] = thread = threading.Thread(target=self._run, args=(call,), name=self._name, daemon=True)
            try:
                thread.start()
                running[call.tenant] += 1
            except RuntimeError as error:  # the machine has no more threads; the next call tries again
                del self._running[call]
                call.give_up(error)

    def _run(self, call: Call[Any]) -> None:
        began = time.perf_counter()
        try:
            if self._share < 1:
                lower_priority()
            call.run(lambda: self._between_batches(call))
        finally:
            with self._lock:
                self._mean_s += 0.2 * (time.perf_counter() - began - self._mean_s)
                del self._running[call]
                self._end_batch(call)
                self._start()

    def _end_batch(self, call: Call[Any]) -> None:
        """Let the next of a tenant's calls run a batch; the lock is held."""
        if call in self._batches:
            self._batches.remove(call)
            self._batch_ended.notify_all()

    def _between_batches(self, call: Call[Any]) -> None:
        """End a call that is over; while requests run, pause in proportion to the time of the last batch; wait for the turn."""
        call.check()
        assert call.begun is not None
        paused = time.perf_counter()
        with self._lock:
            tenants = len({one.tenant for one in self._running})
        pause_s = (tenants / self._share - 1) * (paused - call.begun)
        while self._pauses_while() and time.perf_counter() < paused + pause_s:
            call.begun = time.perf_counter()
            time.sleep(LOOK_EVERY_S)
            call.check()
        with self._lock:
            self._end_batch(call)
            self._batches.append(call)
            while call is not next(one for one in self._batches if one.tenant == call.tenant):
                self._batch_ended.wait()
                call.begun = time.perf_counter()  # another's batch has ended: nothing stands still
                call.check()
        call.begun = time.perf_counter()
