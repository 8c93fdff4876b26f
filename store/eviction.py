"""Eviction: the least recently used entries make room (paper §5.1); pins spare entries."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Evictable(NamedTuple, Generic[Name]):
    """An entry that may be evicted."""

    name: Name
    bytes: int


class EvictingTier(Protocol[Name]):
    """A tier as `select_victims` sees it."""

    budget_bytes: int

    def held_bytes(self, namespace: str | None = None) -> int:
        """Bytes held by a namespace; None for all."""

    def evictable(self, only: str | None = None, spare: str | None = None) -> Iterator[Evictable[Name]]:
        """Entries of one namespace, or of all but one, or of all, in LRU order."""

    def begin_evict(self, name: Name) -> bool:
        """Mark an entry for eviction; False if it is pinned."""


def select_victims(tier: EvictingTier[Name], victims: list[Name], namespace: str | None = None, entry_bytes: int = 0) -> bool:
    """Select the entries that are evicted so that another one fits: the least recently used.

    So that much traffic of some leaves the others half of the budget, a namespace that would hold more than half of it evicts
    its own entries first; and so do all namespaces but "", which has the ingested documents, together.

    Args:
        tier: holds the entries.
        victims: receives the names; those that `begin_evict` has marked are in it even if this raises.
        namespace: of the entry; None to bring the tier within its budget.
        entry_bytes: its bytes.

    Returns:
        Whether the entry fits then; otherwise the victims need not go.
    """
    if entry_bytes > tier.budget_bytes:
        return False
    excess_bytes = tier.held_bytes() + entry_bytes - tier.budget_bytes
    searches: list[tuple[str | None, str | None]] = [(None, None)]
    if namespace:
        if 2 * (tier.held_bytes() - tier.held_bytes("") + entry_bytes) > tier.budget_bytes:
            searches.insert(0, (None, ""))
        if 2 * (tier.held_bytes(namespace) + entry_bytes) > tier.budget_bytes:
            searches.insert(0, (namespace, None))
    elif namespace == "" and 2 * (tier.held_bytes("") + entry_bytes) > tier.budget_bytes:
        searches.insert(0, ("", None))
    selected: set[Name] = set()
    for only, spare in searches:
        candidates = tier.evictable(only, spare) if excess_bytes > 0 else iter(())
        while excess_bytes > 0 and (candidate := next(candidates, None)) is not None:
            if candidate.name not in selected and tier.begin_evict(candidate.name):
                selected.add(candidate.name)
                victims.append(candidate.name)
                excess_bytes -= candidate.bytes
    return excess_bytes <= 0


class HeldBytes:
    """Bytes that a tier holds, in all and by namespace; not thread-safe."""

    def __init__(self) -> None:
        self.total = 0
        self._by_namespace: Counter[str] = Counter()

    def __call__(self, namespace: str | None = None) -> int:
        """Bytes of a namespace; None for all."""
        return self.total if namespace is None else self._by_namespace[namespace]

    def add(self, namespace: str, count: int) -> None:
        """Count bytes that come, or with a negative number go."""
        self.total += count
        self._by_namespace[namespace] += count
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]


class Pins:
    """Counts of pins by digest, and the digests that are being evicted; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._evicting: set[str] = set()

    @contextmanager
    def hold(self, digests: Sequence[str]) -> Iterator[None]:
        """Spare entries from eviction; look them up after this, since one that is being evicted already still goes."""
        with self._lock:
            self._pinned.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._pinned.subtract(digests)
                for digest in set(digests):
                    if not self._pinned[digest]:
                        del self._pinned[digest]

    def is_pinned(self, digest: str) -> bool:
        """Whether an eviction must spare the entry."""
        return digest in self._pinned

    def begin_evict(self, digest: str) -> bool:
        """Mark an entry for eviction; False where it is pinned."""
        with self._lock:
            if digest in self._pinned:
                return False
            self._evicting.add(digest)
            return True

    def is_evicting(self, digest: str) -> bool:
        """Whether the entry counts as gone although its row and file are still there."""
        return digest in self._evicting

    def end_evict(self, digests: Iterable[str]) -> None:
        """Unmark entries: their eviction is done, or it failed."""
        with self._lock:
            self._evicting.difference_update(digests)


class AdmissionFilter:
    """Second-hit filter: remembers the last names that it was asked about. Thread-safe.

    Args:
        limit: weight of all that is remembered together; what was asked about longest ago is forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._weights: OrderedDict[str, int] = OrderedDict()
        self._total = 0

    def admits(self, name: str, weight: int = 1) -> bool:
        """Whether the name was asked about before, and not forgotten since; it is remembered from now on."""
        with self._lock:
            before = self._weights.pop(name, None)
            self._weights[name] = weight
            self._total += weight - (before or 0)
            while self._total > self._limit:
                self._total -= self._weights.popitem(last=False)[1]
            return before is not None
