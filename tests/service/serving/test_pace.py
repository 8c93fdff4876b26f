"""Decoding gets its share of the time beside a prefill."""

from __future__ import annotations

import pytest

from cacheblend.base.errors import ConfigError
from cacheblend.service.serving import ServingConfig
from cacheblend.service.serving.pace import DecodePace


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
