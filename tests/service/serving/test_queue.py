"""Turns: a ring of tenants, and within each a ring of salts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cacheblend.service.serving.calls import FairQueue


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
    queue = FairQueue[Waiting](64)
    for number in range(56):
        queue.put(Waiting("a", f"salt-{number}"))
    for _ in range(3):
        queue.put(Waiting("b", ""))
    assert [tenant for tenant, _ in order_of(queue)[:7]] == ["a", "b", "a", "b", "a", "b", "a"]


def test_salts_take_turns_within_a_tenant() -> None:
    """A salt with many requests does not keep the same tenant's others waiting, and each salt's stay in order."""
    queue = FairQueue[Waiting](64)
    for salt in ("x", "x", "x", "y", "z"):
        queue.put(Waiting("a", salt))
    assert [salt for _, salt in order_of(queue)] == ["x", "y", "z", "x", "x"]


def test_a_tenant_that_may_not_is_passed_over() -> None:
    """Who may have no turn now keeps its place, and the next one is taken."""
    queue = FairQueue[Waiting](64)
    first, second = Waiting("a", ""), Waiting("b", "")
    queue.put(first)
    queue.put(second)
    assert queue.take(lambda tenant: tenant != "a") is second
    assert queue.take(lambda tenant: tenant != "a") is None
    assert (queue.take(), len(queue)) == (first, 0)


@pytest.mark.parametrize("gone", [{0}, {0, 1, 2}, {3}, {0, 1, 2, 3}])
def test_remove(gone: set[int]) -> None:
    """What has ended leaves, and room is counted by tenant."""
    queue = FairQueue[Waiting](3)
    every = [Waiting("a", "x", 0), Waiting("a", "x", 1), Waiting("a", "y", 2), Waiting("b", "", 3)]
    for request in every:
        queue.put(request)
    assert not queue.has_room("a")
    assert {request.number for request in queue.remove(lambda request: request.number in gone)} == gone
    assert len(queue) == 4 - len(gone)
    assert queue.count("a") == sum(request.number not in gone for request in every[:3])
    assert len(order_of(queue)) == 4 - len(gone)
