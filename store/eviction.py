"""Which entries go to make room: the least recently used (paper §5.1), within what each namespace may hold."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from cacheblend.base.errors import ConfigError


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


Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceShare:
    """What one namespace may hold of a tier.

    Args:
        budget_bytes: most bytes; None for as much as the tier has.
        reserved_bytes: as long as the namespace holds no more than this, entries of others take nothing from it. What it does
            not use is lent to others until it does.

    Raises:
        ConfigError: a number of bytes that is not a whole number, a budget of 0, or one below the reserve.

    """

    budget_bytes: int | None = None
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and not (_is_whole(self.budget_bytes) and self.budget_bytes > 0):
            raise ConfigError("budget_bytes", self.budget_bytes, "give a whole number of bytes above 0, or None for no limit")
        if not _is_whole(self.reserved_bytes) or self.reserved_bytes < 0:
            raise ConfigError("reserved_bytes", self.reserved_bytes, "give a whole number of bytes, 0 or above")
        if self.budget_bytes is not None and self.reserved_bytes > self.budget_bytes:
            raise ConfigError("reserved_bytes", self.reserved_bytes, f"at most budget_bytes={self.budget_bytes}")


class Evictable(NamedTuple, Generic[Name]):
    """An entry that may go."""

    name: Name
    namespace: str
    bytes: int


class ByUse(Protocol[Name]):
    """A tier's entries, the least recently used first."""

    def __call__(self, *, only: str | None = None, spare: Iterable[str] = ()) -> Iterator[Evictable[Name]]:
        """Those of one namespace, or of all but some."""


@dataclass(frozen=True, slots=True)
class TierBudget:
    """What a tier may hold, in all and by namespace.

    Args:
        bytes: most bytes in all.
        shares: of namespaces that are known by name.
        recent_bytes: reserved for each of the others that were used last.
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
    def most_recent(self) -> int:
        """How many times `recent_bytes` fit beside what `shares` reserve."""
        return max(0, self.unreserved_bytes) // self.recent_bytes if self.recent_bytes else 0

    def most(self, namespace: str) -> int:
        """Most bytes that a namespace may hold."""
        share = self.shares.get(namespace)
        return self.bytes if share is None or share.budget_bytes is None else min(self.bytes, share.budget_bytes)

    def used(self, namespace: str) -> None:
        """An entry of a namespace comes or is read."""
        if namespace not in self.shares:
            self.recent.used(namespace)

    def choose(
        self,
        namespace: str | None,
        entry_bytes: int,
        total_bytes: int,
        held: Callable[[str], int],
        by_use: ByUse[Name],
        take: Callable[[Name], bool],
    ) -> bool:
        """Choose what goes so that an entry fits.

        A namespace gives to others only while it holds more than its reserve, so an entry within its own namespace's reserve
        always finds room, but for pins; the giver may end below its reserve by less than one entry.

        Args:
            namespace: of the entry; None, with `entry_bytes` 0, to bring what is there within the budget.
            entry_bytes: its bytes.
            total_bytes: bytes held by all namespaces.
            held: gives the bytes held by one; asked for few, however many there are.
            by_use: gives the entries there are.
            take: told of each choice; False where the entry must stay after all.

        Returns:
            Whether it fits then; where not, what was taken need not go.

        """
        reserved = dict.fromkeys(self.recent.names(), self.recent_bytes)
        reserved |= {name: share.reserved_bytes for name, share in self.shares.items()}
        holds = {name: held(name) for name in reserved}
        if namespace is not None:
            if entry_bytes > self.most(namespace):
                return False
            holds[namespace] = held(namespace) + entry_bytes
        total_bytes += entry_bytes
        taken: set[Name] = set()

        def gives(giver: str) -> bool:
            return giver == namespace or giver not in reserved or holds[giver] > reserved[giver]

        def free(excess: Callable[[], int], candidates: Iterator[Evictable[Name]]) -> bool:
            nonlocal total_bytes
            while excess() > 0:
                candidate = next(candidates, None)
                if candidate is None:
                    return False
                if candidate.name not in taken and gives(candidate.namespace) and take(candidate.name):
                    taken.add(candidate.name)
                    total_bytes -= candidate.bytes
                    if candidate.namespace in holds:
                        holds[candidate.namespace] -= candidate.bytes
            return True

        def excess_of(name: str) -> int:
            return holds[name] - self.most(name)

        fits = True
        for name in self.shares if namespace is None else (namespace,):
            fits &= free(partial(excess_of, name), by_use(only=name))
        spare = [name for name in reserved if not gives(name)]
        return free(lambda: total_bytes - self.bytes, by_use(spare=spare)) and fits


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Pins:
    """Counts of pins by digest, and the digests that an eviction has chosen; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: Counter[str] = Counter()
        self._leaving: set[str] = set()

    @contextmanager
    def hold(self, digests: Sequence[str]) -> Iterator[None]:
        """Keep entries from being evicted; look them up after this, since one that is leaving already still goes."""
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

    def start_leaving(self, digest: str) -> bool:
        """Choose an entry for eviction; False where it is pinned."""
        with self._lock:
            if digest in self._pinned:
                return False
            self._leaving.add(digest)
            return True

    def is_leaving(self, digest: str) -> bool:
        """Whether the entry counts as gone although its row and file are still there."""
        return digest in self._leaving

    def stop_leaving(self, digests: Sequence[str]) -> None:
        """The eviction is over: it is done, or it failed."""
        with self._lock:
            self._leaving.difference_update(digests)


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
