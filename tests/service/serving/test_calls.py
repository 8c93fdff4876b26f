"""Calls of clients: they wait without a thread, give way to requests, and end with their clients."""

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from waiting import wait_until

from cacheblend.base.errors import ClientGoneError, DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.base.threads import LOW_PRIORITY_NICENESS, Check
from cacheblend.service.serving.calls import Call, CallPool

NAME = "tests' calls"


@pytest.fixture
def pool() -> Iterator[CallPool]:
    pool = CallPool(NAME, 8)
    yield pool
    pool.close()
    assert not threads()


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def noted(name: str, order: list[str]) -> Call[str]:
    """A call that notes its name."""
    return Call(lambda _: order.append(name) or name, tenant=name[0])


def held(pool: CallPool, tenant: str) -> tuple[Call[bool], threading.Event]:
    """A call that works until an event, and has begun."""
    gate, begun = threading.Event(), threading.Event()

    def work(check: Check) -> bool:
        begun.set()
        assert gate.wait(60)
        check()
        return True

    call = Call(work, tenant=tenant)
    pool.submit(call)
    assert begun.wait(60)
    return call, gate


def test_waiting_holds_no_thread(pool: CallPool) -> None:
    """However many calls of a tenant wait, it has one thread, and they are done in their order."""
    order: list[str] = []
    first, gate = held(pool, "a")
    calls = [noted(f"a{number}", order) for number in range(6)]
    for call in calls:
        pool.submit(call)
    assert (threads(), pool.count("a")) == (1, 7)
    gate.set()
    assert [call.future.result(60) for call in calls] == order == [f"a{number}" for number in range(6)]
    assert first.future.result(0) is True


@pytest.mark.parametrize("at_once", [math.inf, 1])
def test_tenants(at_once: float) -> None:
    """Tenants' calls run side by side, or, in a pool of one thread, one by one in turns."""
    pool, order = CallPool(NAME, 8, at_once=at_once), list[str]()
    first, gate = held(pool, "a")
    calls = [noted(name, order) for name in ("a1", "a2", "b")]
    for call in calls:
        pool.submit(call)
    if at_once > 1:
        assert calls[-1].future.result(60) == "b"
    assert not first.future.done()
    gate.set()
    for call in calls:
        call.future.result(60)
    assert order == ["b", "a1", "a2"]
    pool.close()


def test_too_many(pool: CallPool) -> None:
    """A tenant's ninth call is refused with the time to come again; another tenant's is not."""
    _, gate = held(pool, "a")
    for _ in range(7):
        pool.submit(Call(lambda _: None, tenant="a"))
    with pytest.raises(QueueFullError, match=NAME) as caught:
        pool.submit(Call(lambda _: None, tenant="a"))
    assert caught.value.retry_after_s >= 1
    other = Call(lambda _: 7, tenant="b")
    pool.submit(other)
    assert other.future.result(60) == 7
    gate.set()


def test_a_client_that_goes(pool: CallPool) -> None:
    """Work whose client has gone is not begun, or ends at its next batch."""
    order: list[str] = []
    running, gate = held(pool, "a")
    waiting = noted("a", order)
    pool.submit(waiting)
    for call in (running, waiting):
        pool.leave(call, ClientGoneError("gone"))
        with pytest.raises(ClientGoneError):
            call.future.result(0)
    assert pool.count("a") == 1
    gate.set()
    wait_until(lambda: not pool.is_busy)
    assert order == []


def test_deadline_before_the_work(pool: CallPool) -> None:
    """A call that is late when its turn comes is not begun; its deadline counts from its arrival."""
    order: list[str] = []
    late = Call(lambda _: order.append("late"), deadline_s=5.0, arrived=time.perf_counter() - 6)
    pool.submit(late)
    with pytest.raises(DeadlineError, match="deadline_s=5"):
        late.future.result(60)
    assert order == []


@pytest.mark.parametrize("until_begun", [False, True])
def test_deadline_of_what_runs(pool: CallPool, until_begun: bool) -> None:
    """A call that becomes late ends at its next batch, unless its deadline was for the beginning."""
    gate = threading.Event()

    def work(check: Check) -> bool:
        gate.wait(60)
        check()
        return True

    call = Call(work, deadline_s=0.3, until_begun=until_begun)
    pool.submit(call)
    wait_until(lambda: time.perf_counter() - call.arrived > call.deadline_s)
    gate.set()
    if until_begun:
        assert call.future.result(60)
    else:
        with pytest.raises(DeadlineError):
            call.future.result(60)


def test_giving_way() -> None:
    """While requests run, a pool pauses between batches, does not count as stalled, and goes on at once when they end."""
    looks, busy, went_on = itertools.count(), threading.Event(), threading.Event()
    busy.set()
    pool = CallPool(NAME, 8, pauses_while=lambda: next(looks) >= 0 and busy.is_set(), share=1e-9)

    def work(check: Check) -> None:
        check()
        went_on.set()

    call = Call(work)
    pool.submit(call)
    wait_until(lambda: next(looks) > 20)
    assert not went_on.is_set()
    busy.clear()
    assert went_on.wait(60)
    call.future.result(60)
    assert pool.stalled_s == 0
    pool.close()


def test_turns_by_batches() -> None:
    """Calls of a tenant run a batch each in turn; one that is given up while it waits for its turn has none."""
    pool, order = CallPool(NAME, 8, per_tenant=8), list[str]()

    def work(name: str, batches: int, gate: threading.Event, check: Check) -> None:
        for _ in range(batches):
            check()
            order.append(name)
            assert gate.wait(60)

    def submit(name: str, batches: int, gate: threading.Event) -> Call[None]:
        call = Call(partial(work, name, batches, gate), tenant=name[0])
        pool.submit(call)
        return call

    gates = [threading.Event() for _ in range(2)]
    large = submit("a large", 4, gates[0])
    wait_until(lambda: order == ["a large"])
    other, gone, small = submit("b", 1, gates[1]), submit("a gone", 9, gates[1]), submit("a small", 1, gates[1])
    wait_until(lambda: order == ["a large", "b"] and len(pool._batches) == 4)
    pool.leave(gone, ClientGoneError("gone"))
    gates[0].set()
    wait_until(lambda: order == ["a large", "b", "a small"])
    assert not large.future.done()
    gates[1].set()
    for call in (large, other, small):
        call.future.result(60)
    assert order[3:] == ["a large"] * 3
    pool.close()


def test_stopping(pool: CallPool) -> None:
    """A pool that stops refuses what waits and what comes; closed, it gives up what runs, whose client hears of it at once."""
    running, gate = held(pool, "a")
    waiting = Call(lambda _: None, tenant="a")
    pool.submit(waiting)
    pool.stop()
    with pytest.raises(ShuttingDownError):
        waiting.future.result(0)
    with pytest.raises(ShuttingDownError):
        pool.submit(Call(lambda _: None))
    assert not running.future.done()
    pool.give_up()
    with pytest.raises(ShuttingDownError):
        running.future.result(0)
    gate.set()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a niceness of its own on Linux only")
def test_low_priority() -> None:
    """A pool of low priority computes at a higher niceness, and the thread that submits keeps its own."""
    pool = CallPool(NAME, 4, share=0.5)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    call = Call(lambda _: os.getpriority(os.PRIO_PROCESS, 0))
    pool.submit(call)
    assert call.future.result(60) >= LOW_PRIORITY_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    pool.close()
