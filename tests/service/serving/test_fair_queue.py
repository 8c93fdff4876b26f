"""Tenants take turns, whoever has more requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cacheblend.service.serving.fair_queue import FairQueue


@dataclass(frozen=True)
class Waiting:
    tenant: str
    number: int = 0


def queue_of(*requests: Waiting) -> FairQueue[Waiting]:
    queue = FairQueue[Waiting]()
    for request in requests:
        queue.put(request)
    return queue


def order_of(queue: FairQueue[Waiting]) -> list[Waiting]:
    """Every request, in the order in which they are served."""
    taken = []
    while (request := queue.take()) is not None:
        taken.append(request)
    return taken


def test_tenants_take_turns() -> None:
    """With fifty-six requests of one tenant before it, another's is the second; a tenant's own stay in order."""
    order = order_of(queue_of(*(Waiting("a", number) for number in range(56)), *(Waiting("b", number) for number in range(3))))
    assert [request.tenant for request in order[:7]] == ["a", "b", "a", "b", "a", "b", "a"]
    assert [request.number for request in order if request.tenant == "a"] == list(range(56))


def test_a_tenant_that_may_not_is_passed_over() -> None:
    """A tenant without a turn now keeps its place, and the next one is served."""
    first, second = Waiting("a"), Waiting("b")
    queue = queue_of(first, second)
    assert queue.take(lambda request: request.tenant != "a") is second
    assert queue.take(lambda request: request.tenant != "a") is None
    assert (queue.take(), len(queue)) == (first, 0)


@pytest.mark.parametrize("gone", [{0}, {0, 1, 2}, {3}, {0, 1, 2, 3}])
def test_remove(gone: set[int]) -> None:
    """Requests that have ended leave, and those that wait are counted by tenant."""
    every = [Waiting("a", 0), Waiting("a", 1), Waiting("a", 2), Waiting("b", 3)]
    queue = queue_of(*every)
    assert {request.number for request in queue.remove(lambda request: request.number in gone)} == gone
    assert (len(queue), queue.count("a")) == (4 - len(gone), sum(request.number not in gone for request in every[:3]))
    assert {request.number for request in order_of(queue)} == {0, 1, 2, 3} - gone


def test_a_tenant_that_was_served_waits_for_the_others() -> None:
    """A tenant's next request comes after another's, although no request of that tenant waited in between."""
    queue = queue_of(Waiting("a", 0))
    assert queue.take() == Waiting("a", 0)
    queue.put(Waiting("a", 1))
    queue.put(Waiting("b", 2))
    assert [request.number for request in order_of(queue)] == [2, 1]


def test_a_request_that_needs_another_turn() -> None:
    """It stays the first of its tenant, and waits for the other tenants' turns."""
    queue = queue_of(Waiting("a", 0), Waiting("a", 1), Waiting("b", 2))
    first = queue.take()
    assert first == Waiting("a", 0)
    queue.put_back(first)
    assert [request.number for request in order_of(queue)] == [2, 0, 1]
