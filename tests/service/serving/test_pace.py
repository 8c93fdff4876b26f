"""Tenants' prefills share the time, and decoding gets its share beside them."""

from __future__ import annotations

import pytest

from cacheblend.base.errors import ConfigError
from cacheblend.service.serving import ServingConfig
from cacheblend.service.serving.scheduler import CREDIT_S, DecodePace, PrefillTurns


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_share(share: float) -> None:
    """Of a long prefill beside steps of 3 ms, in layers of 1 ms, steps take the share, to a layer."""
    pace, now, steps = DecodePace(share), 0.0, 0
    while now < 60.0:
        if share < 1:  # a layer
            now += 0.001
        if pace.is_due(now):
            pace.stepped(now, now + 0.003)
            now, steps = now + 0.003, steps + 1
    assert steps * 0.003 / now == pytest.approx(share, rel=0.1)


def test_a_first_step_is_due() -> None:
    """Nobody waits before the first step."""
    assert DecodePace(0.01).is_due(0.0)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, "half", True, float("nan")])
def test_bad_share(share: object) -> None:
    """A share outside 0..1 is refused, and so is none."""
    with pytest.raises(ConfigError, match="decode_share"):
        ServingConfig(decode_share=share)  # type: ignore[arg-type]  # as a caller may


def had(turns: PrefillTurns, tenants: list[str], layers: int, layer_s: float = 0.01) -> list[str]:
    """Whose layers ran."""
    order = []
    for _ in range(layers):
        order.append(turns.next(tenants))
        turns.spend(order[-1], layer_s)
    return order


def test_tenants_that_always_ask_share_alike() -> None:
    """Three tenants with requests at all times have a third of the layers each, whoever came first."""
    turns = PrefillTurns()
    turns.enter("early")
    had(turns, ["early"], 1000)
    for tenant in ("b", "c"):
        turns.enter(tenant)
    had(turns, ["early", "b", "c"], 100)  # the credit
    order = had(turns, ["early", "b", "c"], 300)
    assert {tenant: order.count(tenant) for tenant in set(order)} == {"early": 100, "b": 100, "c": 100}


def test_who_asks_little_is_served_at_once() -> None:
    """After a pause a tenant's request comes first, and no pause is long enough for more than the credit."""
    turns = PrefillTurns()
    for tenant in ("rare", "busy"):
        turns.enter(tenant)
    had(turns, ["rare"], 1)
    had(turns, ["busy"], 100_000)
    turns.enter("rare")
    order = had(turns, ["busy", "rare"], 100)
    first = order.index("busy")
    assert first == pytest.approx(CREDIT_S / 0.01, abs=1)
    assert order[first:].count("busy") == pytest.approx(order[first:].count("rare"), abs=1)
