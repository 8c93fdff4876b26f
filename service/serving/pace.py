"""Whose layer or token is next: tenants' prefills share the time, and decoding has its share beside them."""

from __future__ import annotations

from collections.abc import Collection

CREDIT_S = 0.25  # of prefilling that a tenant may be ahead of the others behind a pause


class PrefillTurns:
    """Gives the next layer to the tenant whose prefills have had the least time (start-time fair queuing).

    A tenant that asked for nothing meanwhile has its next request prefilled at once, before those that ask all the time, up to
    `CREDIT_S` and no more: nobody saves up time in which the others would wait.
    """

    def __init__(self) -> None:
        self._had_s: dict[str, float] = {}
        self._now_s = 0.0  # what the tenant that was served last has had

    def enter(self, tenant: str) -> None:
        """A request of a tenant is prefilled from now on."""
        self._had_s[tenant] = max(self._had_s.get(tenant, 0.0), self._now_s - CREDIT_S)

    def next(self, tenants: Collection[str]) -> str:
        """Whose turn it is among tenants that have entered."""
        return min(tenants, key=self._had_s.__getitem__)

    def spend(self, tenant: str, seconds: float) -> None:
        """A layer of a tenant's request took so long."""
        self._had_s[tenant] += seconds
        self._now_s = max(self._now_s, self._had_s[tenant])


class DecodePace:
    """Gives decoding its share of the time, and no more while somebody waits for a first token.

    A step costs about the same for one sequence as for many, since it reads the weights once: taken after every layer of a
    short prefill, steps serve one or two sequences each, and the prompt takes twice its time. Taken less often they serve all
    that were prefilled meanwhile.

    Args:
        share: of the time, above 0 and up to 1; with 1 a step follows every layer.
    """

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._next_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether the share is not used up at this moment."""
        return now_s >= self._next_s

    def stepped(self, began_s: float, ended_s: float) -> None:
        """A step took from one moment to the other."""
        self._next_s = ended_s + self._rest * (ended_s - began_s)
