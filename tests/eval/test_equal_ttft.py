"""Throughput at equal TTFT, between the points that were measured and beyond them."""

from __future__ import annotations

import pytest

from cacheblend.eval.load.report import Curve, Reached, equal_ttft, throughput_at
from cacheblend.eval.load.sample import Step


@pytest.mark.parametrize(
    ("ttft_s", "reached"),
    [
        (0.05, Reached(None)),
        (0.1, Reached(1.0)),
        (0.15, Reached(1.5)),
        (0.2, Reached(2.0)),
        (1.2, Reached(2.5)),
        (2.2, Reached(3.0)),
        (9.0, Reached(2.8, at_least=True)),
    ],
)
def test_throughput_at(ttft_s: float, reached: Reached) -> None:
    """Between two points the throughput is on the line between them; outside it is none, or at least the last."""
    found = throughput_at(Curve(((1.0, 0.1), (2.0, 0.2), (3.0, 2.2), (2.8, 5.0))), ttft_s)
    assert found.at_least is reached.at_least
    assert found.rps == (None if reached.rps is None else pytest.approx(reached.rps))


def test_a_lucky_later_point_does_not_count() -> None:
    """Where the TTFT is above once, a later rate that is below again does not make the throughput higher."""
    assert throughput_at(Curve(((1.0, 0.1), (2.0, 0.3), (3.0, 0.1))), 0.2).rps == pytest.approx(1.5)


def test_equal_ttft() -> None:
    """At each of the reference's median TTFTs, every target's throughput stands beside the reference's."""

    def step(target: str, rate: float, rps: float, ttft_s: float | None) -> Step:
        return Step(
            target=target,
            rate_rps=rate,
            requests=1,
            answered=1,
            rejected=0,
            failed=0,
            ttft_median_s=ttft_s,
            ttft_p99_s=ttft_s,
            throughput_rps=rps,
            tokens_per_s=None,
            hit_rate=None,
            quality=None,
            evictions=None,
            latest_send_s=0.0,
        )

    steps = [step("full", 2, 1.0, 2.0), step("full", 1, 0.5, 1.0), step("blend", 1, 1.0, 0.5), step("blend", 2, 2.0, 1.5)]
    steps += [step("down", 1, 0.0, None)]
    first, second = equal_ttft(steps, "full")
    assert first["ttft_median_s"] == 1.0
    assert first["targets"]["full"] == {"throughput_rps": 0.5, "at_least": False, "over_reference": 1.0}
    assert first["targets"]["blend"] == {"throughput_rps": 1.5, "at_least": False, "over_reference": 3.0}
    assert second["targets"]["blend"] == {"throughput_rps": 2.0, "at_least": True, "over_reference": 2.0}
    assert second["targets"]["down"]["throughput_rps"] is None
    assert equal_ttft([step("full", 1, 0.0, None)], "full") == []
