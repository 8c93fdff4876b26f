"""Round robin between tenants: each tenant has a line, and tenants have their turns one after the other."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class HasTenant(Protocol):
    """A request as a queue sees it."""

    tenant: str


_Request = TypeVar("_Request", bound=HasTenant)


class FairQueue(Generic[_Request]):
    """A queue in which the tenant that was served longest ago is next. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, deque[_Request]] = defaultdict(deque)
        self._turns = itertools.count(1)
        self._last_turn: defaultdict[str, int] = defaultdict(int)  # by tenant

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def count(self, tenant: str) -> int:
        """Count a tenant's waiting requests."""
        return len(self._lines[tenant])

    def put(self, request: _Request) -> None:
        """Put a request at the end of its tenant's line."""
        self._lines[request.tenant].append(request)

    def put_back(self, request: _Request) -> None:
        """Put a request at the front of its tenant's line: its turn is over, and it needs another one."""
        self._lines[request.tenant].appendleft(request)

    def take(self, may: Callable[[_Request], bool] = lambda _: True) -> _Request | None:
        """Remove the next request.

        Args:
            may: whether the first request of a line may have a turn now.

        Returns:
            The request; None if no line has one that may.
        """
        waiting = [tenant for tenant, line in self._lines.items() if line and may(line[0])]
        if not waiting:
            return None
        tenant = min(waiting, key=self._last_turn.__getitem__)
        self._last_turn[tenant] = next(self._turns)
        return self._lines[tenant].popleft()

    def remove(self, ended: Callable[[_Request], bool]) -> list[_Request]:
        """Remove the requests for which `ended` holds, and return them."""
        removed = [request for line in self._lines.values() for request in line if ended(request)]
        for request in removed:
            self._lines[request.tenant].remove(request)
        return removed
