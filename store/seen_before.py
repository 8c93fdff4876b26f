"""Names that were seen a while ago at most: what comes a second time is worth more than what came once."""

from __future__ import annotations

import threading
from collections import OrderedDict


class SeenBefore:
    """Remembers the last names that it was asked about. Thread-safe.

    Args:
        most: weight of all that is remembered together; what was asked about longest ago is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._weights: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def again(self, name: str, weight: int = 1) -> bool:
        """Whether the name was asked about before, and not forgotten since; it is remembered from now on."""
        with self._lock:
            before = self._weights.pop(name, None)
            self._weights[name] = weight
            self._total += weight - (before or 0)
            while self._total > self._most:
                self._total -= self._weights.popitem(last=False)[1]
            return before is not None
