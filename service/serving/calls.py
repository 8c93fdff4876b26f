"""Calls of clients: a fair queue, and threads that do the work while somebody waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from cacheblend.base.errors import DeadlineError, QueueFullError, ServiceError, ShuttingDownError
from cacheblend.base.threads import lower_priority
from cacheblend.service.engine.document_encoder import Check

LOOK_EVERY_S = 0.02  # for the end of what work in a pool gives way to
PRESENT_S = 10.0  # a tenant counts as there for so long after it called
TURN_S = 2.0  # a turn that takes longer, in a read of a disk that hangs, say, is no reason for others to wait
_Result = TypeVar("_Result")


class Waiting(Protocol):
    """Call as a queue sees it."""

    tenant: str
    cache_salt: str


_Waiting = TypeVar("_Waiting", bound=Waiting)


class FairQueue(Generic[_Waiting]):
    """A ring of tenants, and within each a ring of cache salts; whose turn is longest ago is next. Not thread-safe.

    So a tenant that makes up a salt a request takes no more turns than one that has none.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def count(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return self._waiting[tenant]

    def put(self, request: _Waiting) -> None:
        """Put a request at the end of its line."""
        self._waiting[request.tenant] += 1
        lines = self._tenants.setdefault(request.tenant, OrderedDict())
        lines.setdefault(request.cache_salt, deque()).append(request)

    def take(self, may: Callable[[str], bool] = lambda _: True) -> _Waiting | None:
        """The next request; its tenant, and its salt within that, go to the end of the turns.

        Args:
            may: whether a tenant may have a turn now.

        Returns:
            The request; None where none waits of a tenant that may.
        """
        tenant = next(filter(may, self._tenants), None)
        if tenant is None:
            return None
        lines = self._tenants.pop(tenant)
        salt, line = lines.popitem(last=False)
        request = line.popleft()
        if line:
            lines[salt] = line
        if lines:
            self._tenants[tenant] = lines
        self._leave(request)
        return request

    def remove(self, ended: Callable[[_Waiting], bool]) -> list[_Waiting]:
        """Take out the requests that `ended` holds of."""
        gone: list[_Waiting] = []
        for tenant, lines in list(self._tenants.items()):
            for salt, line in list(lines.items()):
                leaving = [request for request in line if ended(request)]
                gone += leaving
                if len(leaving) == len(line):
                    del lines[salt]
                elif leaving:
                    lines[salt] = deque(request for request in line if request not in leaving)
            if not lines:
                del self._tenants[tenant]
        for request in gone:
            self._leave(request)
        return gone

    def _leave(self, request: _Waiting) -> None:
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]


class Call(Generic[_Result]):
    """One client's call, and what becomes of it. Thread-safe.

    Args:
        work: given a check to call between batches, which raises where nobody waits any more, and lets others have their turn.
        tenant: who calls; tenants take turns.
        cache_salt: within a tenant, salts take turns.
        deadline_s: the call is given up so long after it arrived; None for never.
        arrived: seconds of `time.perf_counter`, when it came; None for now.
        until_begun: the deadline is for the beginning alone; what has begun goes on.
    """

    def __init__(
        self,
        work: Callable[[Check], _Result],
        *,
        tenant: str = "",
        cache_salt: str = "",
        deadline_s: float | None = None,
        arrived: float | None = None,
        until_begun: bool = False,
    ) -> None:
        self.work, self.tenant, self.cache_salt = work, tenant, cache_salt
        self.future: Future[_Result] = Future()
        self._until_begun, self._deadline_s = until_begun, deadline_s
        self._arrived = time.perf_counter() if arrived is None else arrived
        self._given_up: ServiceError | None = None
        self.begun: float | None = None  # seconds of `time.perf_counter`, when its last batch began
        self.worked_s = 0.0
        self.waits_for_turn = False
        self.is_low_priority = False  # whether its thread runs at a lower priority; set when it begins

    def give_up(self, error: ServiceError) -> None:
        """Have whoever waits see an error now, and the work end at its next check; the first one counts."""
        self._given_up = self._given_up or error
        self._settle(lambda: self.future.set_exception(error))

    @property
    def over(self) -> ServiceError | None:
        """Why the call is not worth going on with; None while it is."""
        if self._given_up is not None:
            return self._given_up
        if self._deadline_s is None or (self._until_begun and self.begun is not None):
            return None
        if time.perf_counter() - self._arrived <= self._deadline_s:
            return None
        return DeadlineError(f"no answer within deadline_s={self._deadline_s:g}; ask for less, or later")

    def check(self) -> None:
        """Raise where the call is over."""
        if (error := self.over) is not None:
            raise error

    def run(self, check: Check) -> None:
        """Do the work."""
        try:
            outcome = partial(self.future.set_result, self.work(check))
        except BaseException as error:  # whoever waits shall see it, whatever it is
            outcome = partial(self.future.set_exception, error)
        self._settle(outcome)

    @staticmethod
    def _settle(settle: Callable[[], None]) -> None:
        with suppress(InvalidStateError):  # it was given up meanwhile
            settle()


class CallPool:
    """Runs calls in threads of its own; none has a thread while it waits. Thread-safe.

    A thread ends with its call: PyTorch's threads of it end too (`base/threads.py`), and none keeps the process.

    Args:
        name: of its threads.
        max_calls: of one tenant, waiting and running; the next one is refused.
        per_tenant: calls of one tenant that run at once.
        one_at_a_time: of those that run, one works, and at each check, or after `TURN_S`, the next tenant's has its turn. Else
            all work. A call of low priority and another one do not wait for each other.
        gives_way: says whether more important work goes on; while it does, what runs here takes `share` of the time.
        share: 0..1.
        ready: whether a tenant's next call is worth beginning; until then it waits, and others have their turns.
        low_priority: whether a tenant's call, as it begins, has a low priority (`lower_priority`).
    """

    def __init__(
        self,
        name: str,
        max_calls: int,
        *,
        per_tenant: int = 1,
        one_at_a_time: bool = False,
        gives_way: Callable[[], bool] = lambda: False,
        share: float = 1.0,
        ready: Callable[[str], bool] = lambda _: True,
        low_priority: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._name, self._max_calls, self._per_tenant, self._one_at_a_time = name, max_calls, per_tenant, one_at_a_time
        self._gives_way, self._rest, self._ready = gives_way, 1 / share - 1, ready
        self._low_priority = low_priority
        self._changed = threading.Condition()
        self._queue: FairQueue[Call[Any]] = FairQueue()
        self._running: list[Call[Any]] = []
        # Those of them that have begun, or may, by whether their priority is low; the first one of each has its turn.
        self._turns: dict[bool, deque[Call[Any]]] = {False: deque(), True: deque()}
        self._came: dict[str, float] = {}  # seconds of `time.perf_counter`, by tenant: its last call
        self._threads: set[threading.Thread] = set()
        self._mean_s: dict[str, float] = {}  # a running mean of a call's work, by tenant, for Retry-After
        self._closing = False

    def submit(self, call: Call[Any]) -> None:
        """Have a call run; its `future` says how it ended.

        Raises:
            QueueFullError: its tenant has `max_calls` already.
            ShuttingDownError: the pool is closing.
        """
        with self._changed:
            if self._closing:
                raise _stopping()
            self._came[call.tenant] = time.perf_counter()
            if (own := self._count(call.tenant)) >= self._max_calls:
                retry_after_s = max(1, math.ceil(own * self._mean_s.get(call.tenant, 1.0)))
                raise QueueFullError(
                    f"{own} {self._name} wait or run already, as many as one client may have; try again in {retry_after_s} s",
                    retry_after_s,
                )
            self._queue.put(call)
            self._start()

    def count(self, tenant: str) -> int:
        """How many calls of a tenant wait or run."""
        with self._changed:
            return self._count(tenant)

    def asks_most(self, tenant: str) -> bool:
        """Whether another tenant that called in the last `PRESENT_S` has fewer calls here."""
        since = time.perf_counter() - PRESENT_S
        with self._changed:
            own = self._count(tenant)
            return any(came > since and self._count(other) < own for other, came in self._came.items() if other != tenant)

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or runs."""
        with self._changed:
            return bool(self._running) or len(self._queue) > 0

    @property
    def stalled_s(self) -> float:
        """For how many seconds one that works has not come to a check; 0 where none works."""
        with self._changed:
            begun = [call.begun for call in self._running if call.begun is not None and not call.waits_for_turn]
        return time.perf_counter() - min(begun) if begun else 0.0

    def leave(self, call: Call[Any], error: ServiceError) -> None:
        """Give a call up: one that waits is forgotten, one that runs ends at its next check."""
        call.give_up(error)
        with self._changed:
            self._queue.remove(lambda waiting: waiting is call)
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no more, and refuse what waits; what runs goes on."""
        with self._changed:
            self._closing = True
            waiting = self._queue.remove(lambda _: True)
        for call in waiting:
            call.give_up(_stopping())

    def close(self, timeout_s: float | None = None) -> None:
        """`stop`, give up what runs, and wait until it has ended, or for `timeout_s`."""
        self.stop()
        with self._changed:
            running, threads = list(self._running), list(self._threads)
        for call in running:
            self.leave(call, _stopping())
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _count(self, tenant: str) -> int:
        return self._queue.count(tenant) + sum(call.tenant == tenant for call in self._running)

    def _start(self) -> None:
        """Start what may run; the lock is held."""
        running = Counter(call.tenant for call in self._running)
        while (call := self._queue.take(lambda tenant: running[tenant] < self._per_tenant)) is not None:
            running[call.tenant] += 1
            self._running.append(call)
            thread = threading.Thread(target=self._run, args=(call,), name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()

    def _run(self, call: Call[Any]) -> None:
        try:
            self._wait_until_ready(call)
            if call.is_low_priority:
                lower_priority()
            self._wait_for_turn(call)
            if call.over is None:
                call.run(lambda: self._between_batches(call))
            else:
                call.give_up(call.over)
        finally:
            with self._changed:
                if call.begun is not None:
                    worked_s = call.worked_s + time.perf_counter() - call.begun
                    before_s = self._mean_s.get(call.tenant, worked_s)
                    self._mean_s[call.tenant] = before_s + 0.2 * (worked_s - before_s)
                self._running.remove(call)
                self._turns[call.is_low_priority].remove(call)
                self._threads.discard(threading.current_thread())
                self._start()
                self._changed.notify_all()

    def _between_batches(self, call: Call[Any]) -> None:
        """Look whether the call is worth going on with, give way, and let others have their turn."""
        call.check()
        assert call.begun is not None
        batch_s = time.perf_counter() - call.begun
        call.worked_s += batch_s
        until = time.perf_counter() + self._rest * batch_s
        while self._gives_way() and time.perf_counter() < until:
            call.begun = time.perf_counter()
            time.sleep(min(LOOK_EVERY_S, self._rest * batch_s))
            call.check()
        turns = self._turns[call.is_low_priority]
        with self._changed:
            if self._one_at_a_time and turns[0] is call:
                turns.rotate(-1)
                self._changed.notify_all()
        self._wait_for_turn(call)
        call.check()

    def _wait_until_ready(self, call: Call[Any]) -> None:
        with self._changed:
            while call.over is None and not self._ready(call.tenant):
                self._changed.wait(LOOK_EVERY_S)
            call.is_low_priority = self._low_priority(call.tenant)
            self._turns[call.is_low_priority].append(call)

    def _wait_for_turn(self, call: Call[Any]) -> None:
        turns = self._turns[call.is_low_priority]
        with self._changed:
            call.waits_for_turn = True
            while self._one_at_a_time and (first := turns[0]) is not call and call.over is None:
                took_s = 0.0 if first.begun is None or first.waits_for_turn else time.perf_counter() - first.begun
                if took_s > TURN_S:
                    turns.rotate(-1)
                    self._changed.notify_all()
                else:
                    self._changed.wait(TURN_S / 10)
            call.waits_for_turn = False
            if call.over is None:
                call.begun = time.perf_counter()


def _stopping() -> ShuttingDownError:
    return ShuttingDownError("the service is shutting down; ask another one, or later")
