"""Eviction: the least recently used entries make room (paper §5.1), within what each namespace may hold; pins spare entries."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from cacheblend.base.checks import is_whole
from cacheblend.base.errors import ConfigError

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceShare:
    """Bytes of a tier that one namespace may hold, and those that are reserved for it.

    Args:
        budget_bytes: limit; None for the tier's.
        reserved_bytes: as long as the namespace holds no more than this, entries of others evict none of its own. What it does
            not use is lent to others until it does.

    Raises:
        ConfigError: a number of bytes that is not a whole number, a budget of 0, or one below the reserve.
    """

    budget_bytes: int | None = None
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and not (is_whole(self.budget_bytes) and self.budget_bytes > 0):
            raise ConfigError("budget_bytes", self.budget_bytes, "give a whole number of bytes above 0, or None for no limit")
        if not is_whole(self.reserved_bytes) or self.reserved_bytes < 0:
            raise ConfigError("reserved_bytes", self.reserved_bytes, "give a whole number of bytes, 0 or above")
        if self.budget_bytes is not None and self.reserved_bytes > self.budget_bytes:
            raise ConfigError("reserved_bytes", self.reserved_bytes, f"at most budget_bytes={self.budget_bytes}")


class RecentNamespaces:
    """The last `limit` namespaces by use, however many there are. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._names: OrderedDict[str, None] = OrderedDict()

    def record_use(self, namespace: str) -> None:
        """Note a use; the namespace used longest ago may go for it."""
        with self._lock:
            self._names[namespace] = None
            self._names.move_to_end(namespace)
            while len(self._names) > self.limit:
                self._names.popitem(last=False)

    def names(self) -> list[str]:
        """The namespaces, the least recently used first."""
        with self._lock:
            return list(self._names)


class Evictable(NamedTuple, Generic[Name]):
    """An entry that may be evicted."""

    name: Name
    namespace: str
    bytes: int


class EvictingTier(Protocol[Name]):
    """A tier as `TierBudget.select_victims` sees it."""

    def held_bytes(self, namespace: str | None = None) -> int:
        """Bytes held by a namespace; None for all."""

    def evictable(self, *, only: str | None = None, spare: Sequence[str] = ()) -> Iterator[Evictable[Name]]:
        """Entries of one namespace, or of all but some, in LRU order."""

    def begin_evict(self, name: Name) -> bool:
        """Mark an entry for eviction; False where it is pinned."""


@dataclass(frozen=True, slots=True)
class TierBudget:
    """Bytes that a tier may hold, in all and by namespace.

    Args:
        bytes: limit of all.
        shares: of namespaces that are known by name.
        recent_bytes: reserved for each of the other namespaces that were used last.
        recent: which those are; tiers may share it.
    """

    bytes: int
    shares: Mapping[str, NamespaceShare] = field(default_factory=dict)
    recent_bytes: int = 0
    recent: RecentNamespaces = field(default_factory=lambda: RecentNamespaces(0))

    @property
    def unreserved_bytes(self) -> int:
        """What `shares` leave; below 0 where they reserve more than there is."""
        return self.bytes - sum(share.reserved_bytes for share in self.shares.values())

    @property
    def recent_limit(self) -> int:
        """How many times `recent_bytes` fit beside what `shares` reserve."""
        return max(0, self.unreserved_bytes) // self.recent_bytes if self.recent_bytes else 0

    def limit_bytes(self, namespace: str) -> int:
        """Bytes that a namespace may hold."""
        share = self.shares.get(namespace)
        return self.bytes if share is None or share.budget_bytes is None else min(self.bytes, share.budget_bytes)

    def record_use(self, namespace: str) -> None:
        """Note that an entry of a namespace comes or is read."""
        if namespace not in self.shares:
            self.recent.record_use(namespace)

    def select_victims(
        self, tier: EvictingTier[Name], victims: list[Name], namespace: str | None = None, entry_bytes: int = 0
    ) -> bool:
        """Select what is evicted so that an entry fits.

        A namespace lends only what it holds above its reserve, so an entry within its own namespace's reserve always finds
        room, but for pins; the lender may end below its reserve by less than one entry.

        Args:
            tier: holds the entries.
            victims: gets the names; those that `begin_evict` has marked are in it even where this raises.
            namespace: of the entry; None to bring what is held within the budget.
            entry_bytes: its bytes.

        Returns:
            Whether the entry fits then; where not, the victims need not go.
        """
        if namespace is not None and entry_bytes > self.limit_bytes(namespace):
            return False
        reserved = dict.fromkeys(self.recent.names(), self.recent_bytes)
        reserved |= {name: share.reserved_bytes for name, share in self.shares.items()}
        held = {name: tier.held_bytes(name) for name in reserved}
        if namespace is not None:
            held[namespace] = tier.held_bytes(namespace) + entry_bytes
        total_bytes = tier.held_bytes() + entry_bytes
        selected: set[Name] = set()

        def lends(name: str) -> bool:
            return name == namespace or name not in reserved or held[name] > reserved[name]

        def evict(candidate: Evictable[Name]) -> None:
            nonlocal total_bytes
            if candidate.name not in selected and lends(candidate.namespace) and tier.begin_evict(candidate.name):
                selected.add(candidate.name)
                victims.append(candidate.name)
                total_bytes -= candidate.bytes
                if candidate.namespace in held:
                    held[candidate.namespace] -= candidate.bytes

        # 1. Each namespace within its own limit, by entries of its own.
        fits = True
        for name in self.shares if namespace is None else (namespace,):
            own = tier.evictable(only=name)
            while held[name] > self.limit_bytes(name) and (candidate := next(own, None)) is not None:
                evict(candidate)
            fits &= held[name] <= self.limit_bytes(name)
        # 2. All within the budget, by entries of whoever lends.
        spare = [name for name in reserved if not lends(name)]
        lent = tier.evictable(spare=spare)
        while total_bytes > self.bytes and (candidate := next(lent, None)) is not None:
            evict(candidate)
        return fits and total_bytes <= self.bytes


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
