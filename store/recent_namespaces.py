"""Which namespaces were used last: those that have a reserve although nobody named them."""

from __future__ import annotations

import threading
from collections import OrderedDict


class RecentNamespaces:
    """The last few namespaces by use, however many there are in all. Thread-safe.

    Args:
        most: how many; 0 keeps none.

    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    @property
    def most(self) -> int:
        """How many are kept."""
        return self._most

    def used(self, namespace: str) -> None:
        """A namespace is used now; the one used longest ago may go for it."""
        with self._lock:
            self._names[namespace] = None
            self._names.move_to_end(namespace)
            while len(self._names) > self._most:
                self._names.popitem(last=False)

    def names(self) -> list[str]:
        """Those that are kept, the least recently used first."""
        with self._lock:
            return list(self._names)
