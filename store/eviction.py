"""Which entries go to make room: the least recently used (paper §5.1), within what each namespace may hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .errors import ConfigError


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


class Evictable(NamedTuple):
    """An entry that may go."""

    digest: str
    namespace: str
    bytes: int


class ByUse(Protocol):
    """A tier's entries, the least recently used first."""

    def __call__(self, *, only: str | None = None, spare: Iterable[str] = ()) -> Iterator[Evictable]:
        """Those of one namespace, or of all but some."""


@dataclass(frozen=True, slots=True)
class TierBudget:
    """What a tier may hold, in all and by namespace."""

    bytes: int
    shares: Mapping[str, NamespaceShare] = field(default_factory=dict)

    def most(self, namespace: str) -> int:
        """Most bytes that a namespace may hold."""
        share = self.shares.get(namespace)
        return self.bytes if share is None or share.budget_bytes is None else min(self.bytes, share.budget_bytes)

    def choose(
        self, namespace: str | None, entry_bytes: int, held: Mapping[str, int], by_use: ByUse, take: Callable[[str], bool]
    ) -> bool:
        """Choose what goes so that an entry fits.

        A namespace gives to others only while it holds more than its reserve, so an entry within its own namespace's reserve
        always finds room, but for pins; the giver may end below its reserve by less than one entry.

        Args:
            namespace: of the entry; None, with `entry_bytes` 0, to bring what is there within the budget.
            entry_bytes: its bytes.
            held: bytes held by each namespace.
            by_use: gives the entries there are.
            take: told of each choice; False where the entry must stay after all.

        Returns:
            Whether it fits then; where not, what was taken need not go.

        """
        holds = dict(held)
        if namespace is not None:
            if entry_bytes > self.most(namespace):
                return False
            holds[namespace] = holds.get(namespace, 0) + entry_bytes
        taken: set[str] = set()

        def free(names: Collection[str], limit_bytes: int, candidates: Iterator[Evictable]) -> bool:
            while sum(holds.get(name, 0) for name in names) > limit_bytes:
                candidate = next(candidates, None)
                if candidate is None:
                    return False
                if (
                    candidate.digest not in taken
                    and self._gives(candidate.namespace, namespace, holds)
                    and take(candidate.digest)
                ):
                    taken.add(candidate.digest)
                    holds[candidate.namespace] -= candidate.bytes
            return True

        fits = True
        for name in self.shares if namespace is None else (namespace,):
            fits &= free((name,), self.most(name), by_use(only=name))
        spare = [name for name in self.shares if not self._gives(name, namespace, holds)]
        return free(holds.keys(), self.bytes, by_use(spare=spare)) and fits

    def _gives(self, giver: str, namespace: str | None, holds: Mapping[str, int]) -> bool:
        share = self.shares.get(giver)
        return giver == namespace or share is None or holds.get(giver, 0) > share.reserved_bytes


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
