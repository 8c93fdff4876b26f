"""What waits: bounded for each tenant, taken in turns."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What a queue tells apart."""

    tenant: str
    cache_salt: str


_Waiting = TypeVar("_Waiting", bound=Waiting)


class FairQueue(Generic[_Waiting]):
    """A ring of tenants, and within each a ring of cache salts; whose turn is longest ago is next. Not thread-safe.

    So a tenant that makes up a salt a request takes no more turns than one that has none.

    Args:
        most: requests of one tenant that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: OrderedDict[str, OrderedDict[str, deque[_Waiting]]] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def count(self, tenant: str) -> int:
        """How many of a tenant wait."""
        return self._waiting[tenant]

    def has_room(self, tenant: str) -> bool:
        """Whether one more of a tenant may wait."""
        return self._waiting[tenant] < self._most

    def put(self, request: _Waiting) -> None:
        """Put a request at the end of its line; ask `has_room` before."""
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
