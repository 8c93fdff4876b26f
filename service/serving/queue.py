"""Requests that wait: bounded for each tenant, taken in turns."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from .request import ServedRequest


class FairQueue:
    """One line for each tenant and cache salt; the next request is of the one whose turn is longest ago. Not thread-safe.

    Args:
        most: requests of one tenant that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: OrderedDict[tuple[str, str], deque[ServedRequest]] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._waiting.total()

    def has_room(self, tenant: str) -> bool:
        """Whether one more request of a tenant may wait."""
        return self._waiting[tenant] < self._most

    def put(self, request: ServedRequest) -> None:
        """Put a request at the end of its line; ask `has_room` before."""
        self._waiting[request.tenant] += 1
        self._lines.setdefault((request.tenant, request.cache_salt), deque()).append(request)

    def take(self) -> ServedRequest:
        """The next request; its line goes to the end of the turns.

        Raises:
            KeyError: none waits.
        """
        name, line = self._lines.popitem(last=False)
        request = line.popleft()
        if line:
            self._lines[name] = line
        self._leave(request)
        return request

    def remove(self, ended: Callable[[ServedRequest], bool]) -> list[ServedRequest]:
        """Take out the requests that `ended` holds of."""
        gone: list[ServedRequest] = []
        for name, line in list(self._lines.items()):
            leaving = [request for request in line if ended(request)]
            gone += leaving
            if len(leaving) == len(line):
                del self._lines[name]
            elif leaving:
                self._lines[name] = deque(request for request in line if request not in leaving)
        for request in gone:
            self._leave(request)
        return gone

    def _leave(self, request: ServedRequest) -> None:
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
