"""Throughput that servers reach at the same median TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .step import Step


@dataclass(frozen=True, slots=True)
class Curve:
    """One target's points, by rising rate: requests a second that it answered, and their median TTFT in seconds."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Curve:
        """The curve of a target's steps; a step without an answer has no point."""
        rising = sorted(steps, key=lambda step: step.rate_rps)
        return cls(tuple((step.throughput_rps, step.ttft_median_s) for step in rising if step.ttft_median_s is not None))


@dataclass(frozen=True, slots=True)
class Reached:
    """Throughput at a TTFT.

    Args:
        rps: requests a second; None where already the lowest rate took longer.
        at_least: no rate took longer, so it may be more.
    """

    rps: float | None
    at_least: bool = False


def throughput_at(curve: Curve, ttft_s: float) -> Reached:
    """The throughput up to which the median TTFT stays within `ttft_s`.

    Between two points both are taken to change in a straight line. Behind the first point that is above, later ones do not
    count, even if chance brought one of them below again.
    """
    reached: Reached | None = None
    before: tuple[float, float] | None = None
    for rps, own_s in curve.points:
        if own_s > ttft_s:
            if before is None:
                return Reached(None)
            share = (ttft_s - before[1]) / (own_s - before[1])
            return Reached(before[0] + share * (rps - before[0]))
        before, reached = (rps, own_s), Reached(rps, at_least=True)
    return reached or Reached(None)


def equal_ttft(steps: Sequence[Step], reference: str) -> list[dict[str, Any]]:
    """At each median TTFT that the reference had, what every target reaches.

    Args:
        steps: all of them.
        reference: a target's label; `over_reference` is a target's throughput over this one's.
    """
    labels = list(dict.fromkeys(step.target for step in steps))
    curves = {label: Curve.of([step for step in steps if step.target == label]) for label in labels}
    rows = []
    for ttft_s in sorted({ttft_s for _, ttft_s in curves.get(reference, Curve(())).points}):
        base = throughput_at(curves[reference], ttft_s).rps
        found = {label: throughput_at(curve, ttft_s) for label, curve in curves.items()}
        rows.append(
            {
                "ttft_median_s": ttft_s,
                "targets": {
                    label: {
                        "throughput_rps": one.rps,
                        "at_least": one.at_least,
                        "over_reference": one.rps / base if one.rps is not None and base else None,
                    }
                    for label, one in found.items()
                },
            }
        )
    return rows
