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

    def put(self, request: ServedRequest) -> bool:
        """Put a request at the end of its line; False where its tenant has too many waiting."""
        if self._waiting[request.tenant] >= self._most:
            return False
        self._waiting[request.tenant] += 1
        self._lines.setdefault((request.tenant, request.cache_salt), deque()).append(request)
        return True

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
