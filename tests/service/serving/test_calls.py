"""The fair queue, and calls of clients: they wait without a thread, take turns between batches, end with their clients."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from waiting import wait_until

from cacheblend.base.errors import ClientGoneError, DeadlineError, QueueFullError, ShuttingDownError
from cacheblend.base.threads import LOW_PRIORITY_NICENESS
from cacheblend.service.engine.document_encoder import Check
from cacheblend.service.serving.calls import TURN_S, Call, CallPool, FairQueue


@dataclass(frozen=True)
class Waiting:
    tenant: str
    cache_salt: str
    number: int = 0


def order_of(queue: FairQueue[Waiting]) -> list[tuple[str, str]]:
    """What is taken, to the end."""
    taken = []
    while len(queue):
        request = queue.take()
        assert request is not None
        taken.append((request.tenant, request.cache_salt))
    return taken


def test_a_tenant_that_makes_up_salts_has_no_more_turns() -> None:
    """With fifty-six requests of as many salts before it, another tenant's request is the second."""
    queue = FairQueue[Waiting]()
    for number in range(56):
        queue.put(Waiting("a", f"salt-{number}"))
    for _ in range(3):
        queue.put(Waiting("b", ""))
    assert [tenant for tenant, _ in order_of(queue)[:7]] == ["a", "b", "a", "b", "a", "b", "a"]


def test_salts_take_turns_within_a_tenant() -> None:
    """A salt with many requests does not keep the same tenant's others waiting, and each salt's stay in order."""
    queue = FairQueue[Waiting]()
    for salt in ("x", "x", "x", "y", "z"):
        queue.put(Waiting("a", salt))
    assert [salt for _, salt in order_of(queue)] == ["x", "y", "z", "x", "x"]


def test_a_tenant_that_may_not_is_passed_over() -> None:
    """Who may have no turn now keeps its place, and the next one is taken."""
    queue = FairQueue[Waiting]()
    first, second = Waiting("a", ""), Waiting("b", "")
    queue.put(first)
    queue.put(second)
    assert queue.take(lambda tenant: tenant != "a") is second
    assert queue.take(lambda tenant: tenant != "a") is None
    assert (queue.take(), len(queue)) == (first, 0)


@pytest.mark.parametrize("gone", [{0}, {0, 1, 2}, {3}, {0, 1, 2, 3}])
def test_remove(gone: set[int]) -> None:
    """What has ended leaves, and what waits is counted by tenant."""
    queue = FairQueue[Waiting]()
    every = [Waiting("a", "x", 0), Waiting("a", "x", 1), Waiting("a", "y", 2), Waiting("b", "", 3)]
    for request in every:
        queue.put(request)
    assert {request.number for request in queue.remove(lambda request: request.number in gone)} == gone
    assert len(queue) == 4 - len(gone)
    assert queue.count("a") == sum(request.number not in gone for request in every[:3])
    assert len(order_of(queue)) == 4 - len(gone)


NAME = "tests' calls"


@pytest.fixture
def pool() -> Iterator[CallPool]:
    pool = CallPool(NAME, 8, one_at_a_time=True)
    yield pool
    pool.close()
    assert not threads()


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def batches(count: int, name: str, order: list[str]) -> Callable[[Check], str]:
    """Work of so many batches, which notes each."""

    def work(check: Check) -> str:
        for _ in range(count):
            order.append(name)
            check()
        return name

    return work


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
    calls = [Call(batches(1, str(number), order), tenant="a") for number in range(6)]
    for call in calls:
        pool.submit(call)
    assert (threads(), pool.count("a")) == (1, 7)
    gate.set()
    assert [call.future.result(60) for call in calls] == order == [str(number) for number in range(6)]
    assert first.future.result(0) is True


def test_turns_between_batches(pool: CallPool) -> None:
    """A tenant's short call is done while another's long one has come a batch or two further."""
    order: list[str] = []
    gate, begun = threading.Event(), threading.Event()

    def long(check: Check) -> None:
        begun.set()
        gate.wait(60)
        batches(200, "a", order)(check)

    calls = [Call(long, tenant="a"), *(Call(batches(1, name, order), tenant=name) for name in "bc")]
    pool.submit(calls[0])
    assert begun.wait(60)
    for call in calls[1:]:
        pool.submit(call)
    wait_until(lambda: all(call.waits_for_turn for call in calls[1:]))
    gate.set()
    for call in calls:
        call.future.result(60)
    assert max(order.index("b"), order.index("c")) <= 3


def test_too_many(pool: CallPool) -> None:
    """A tenant's ninth call is refused, and told to come when its own will be done; another tenant's is not."""
    _, gate = held(pool, "a")
    for _ in range(7):
        pool.submit(Call(lambda _: None, tenant="a"))
    with pytest.raises(QueueFullError, match=NAME) as caught:
        pool.submit(Call(lambda _: None, tenant="a"))
    assert caught.value.retry_after_s >= 1
    other = Call(lambda _: 7, tenant="b")
    pool.submit(other)
    gate.set()
    assert other.future.result(60) == 7


def test_retry_after_counts_the_tenants_own(pool: CallPool) -> None:
    """Another tenant's slow calls are not in a tenant's `Retry-After`."""
    pool._mean_s.update(a=100.0, b=0.01)
    _, gate = held(pool, "a")
    seconds = {}
    for tenant in "ab":
        while pool.count(tenant) < 8:
            pool.submit(Call(lambda _: None, tenant=tenant))
        with pytest.raises(QueueFullError) as caught:
            pool.submit(Call(lambda _: None, tenant=tenant))
        seconds[tenant] = caught.value.retry_after_s
    gate.set()
    assert seconds == {"a": 800, "b": 1}


def test_a_client_that_goes(pool: CallPool) -> None:
    """Work whose client has gone is not begun, or ends at its next batch."""
    order: list[str] = []
    running, gate = held(pool, "a")
    waiting = Call(batches(1, "never", order), tenant="a")
    pool.submit(waiting)
    for call in (running, waiting):
        pool.leave(call, ClientGoneError("gone"))
        with pytest.raises(ClientGoneError):
            call.future.result(0)
    assert pool.count("a") == 1
    gate.set()
    wait_until(lambda: not pool.is_busy)
    assert order == []


@pytest.mark.parametrize("until_begun", [False, True])
def test_deadline(pool: CallPool, until_begun: bool) -> None:
    """A call is late by the time since it arrived; one whose beginning alone has a deadline goes on."""
    order: list[str] = []
    late = Call(batches(1, "late", order), tenant="a", deadline_s=5.0, arrived=time.perf_counter() - 6)
    pool.submit(late)
    with pytest.raises(DeadlineError, match="deadline_s=5"):
        late.future.result(60)
    assert order == []
    gate = threading.Event()

    def work(check: Check) -> bool:
        gate.wait(60)
        check()
        return True

    call = Call(work, tenant="b", deadline_s=0.1, until_begun=until_begun)
    pool.submit(call)
    wait_until(lambda: call.begun is not None)
    time.sleep(0.15)
    gate.set()
    if until_begun:
        assert call.future.result(60)
    else:
        with pytest.raises(DeadlineError):
            call.future.result(60)


def test_giving_way() -> None:
    """While more important work goes on, a pool takes its share of the time, and goes on at once when that ends."""
    busy = threading.Event()
    busy.set()
    pool = CallPool(NAME, 8, gives_way=busy.is_set, share=0.01)
    went_on = threading.Event()

    def work(check: Check) -> None:
        time.sleep(0.05)
        check()
        went_on.set()

    call = Call(work)
    pool.submit(call)
    assert not went_on.wait(0.5)
    assert pool.stalled_s < 0.4
    busy.clear()
    assert went_on.wait(60)
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
    pool.close(timeout_s=0)
    with pytest.raises(ShuttingDownError):
        running.future.result(0)
    gate.set()


def test_an_error_is_the_callers(pool: CallPool) -> None:
    """What work raises comes to who waits for it, and the next call is done."""
    failing, next_one = Call(lambda _: 1 // 0), Call(lambda _: 2)
    pool.submit(failing)
    pool.submit(next_one)
    with pytest.raises(ZeroDivisionError):
        failing.future.result(60)
    assert next_one.future.result(60) == 2


def test_not_before_it_is_worth_it() -> None:
    """A call whose tenant is not ready waits, is given up as others are, and keeps nobody else's turn."""
    ready = {"a": False, "b": True}
    pool = CallPool("calls", 4, one_at_a_time=True, ready=ready.__getitem__)
    held, given_up, other = (Call(lambda _: "done", tenant=tenant) for tenant in ("a", "a", "b"))
    for call in (held, given_up, other):
        pool.submit(call)
    assert other.future.result(60) == "done"
    assert not held.future.done()
    pool.leave(given_up, ClientGoneError("gone"))
    ready["a"] = True
    assert held.future.result(60) == "done"
    with pytest.raises(ClientGoneError):
        given_up.future.result(60)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
def test_threads_behind_others() -> None:
    """A pool behind others computes at a higher niceness, and the thread that submits keeps its own."""
    pool = CallPool("calls", 4, low_priority=lambda _: True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    call = Call(lambda _: os.getpriority(os.PRIO_PROCESS, 0))
    pool.submit(call)
    assert call.future.result(60) >= LOW_PRIORITY_NICENESS
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    pool.close()


def test_a_call_ahead_does_not_wait_for_one_behind() -> None:
    """While a call at the lower priority keeps its turn, another tenant's ahead of it is done at once."""
    pool = CallPool(NAME, 4, one_at_a_time=True, low_priority={"a": True, "b": False}.__getitem__)
    _, gate = held(pool, "a")
    began = time.perf_counter()
    ahead = Call(lambda _: "done", tenant="b")
    pool.submit(ahead)
    assert ahead.future.result(60) == "done"
    assert time.perf_counter() - began < TURN_S / 2
    gate.set()
    pool.close()


def test_who_asks_most() -> None:
    """A tenant asks most while another that was there lately has fewer calls; alone, or equal, it does not."""
    pool = CallPool(NAME, 4)
    _, gate = held(pool, "a")
    pool.submit(Call(lambda _: None, tenant="a"))
    assert not pool.asks_most("a")  # nobody else is there
    other, other_gate = held(pool, "b")
    assert (pool.asks_most("a"), pool.asks_most("b")) == (True, False)
    other_gate.set()
    other.future.result(60)
    wait_until(lambda: pool.count("b") == 0)
    assert pool.asks_most("a")  # it was there a moment ago
    pool._came["b"] -= 60
    assert not pool.asks_most("a")
    gate.set()
    pool.close()
