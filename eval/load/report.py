"""A load run as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.eval.run.folder import SUMMARY, RunFolder

from .sample import Step


def is_load_run(folder: Path) -> bool:
    """Whether a run's folder is of `cacheblend eval load`.

    Raises:
        InputError: it is no run's folder.
    """
    return "targets" in RunFolder(folder).setup()


def read_summary(folder: Path) -> dict[str, Any]:
    """What `run_load` gave.

    Raises:
        InputError: the run was killed before it had a summary.
    """
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} has no whole {SUMMARY} ({error}): the run was killed; run it again") from error
    return summary


def load_report(summary: Mapping[str, Any]) -> str:
    """Two tables: every target at every rate, and the throughput at equal median TTFT.

    Args:
        summary: what `run_load` gave.
    """
    parts = [f"## Load: {summary['data']}", f"Run: `{summary['run']}`"]
    if summary["interrupted"]:
        parts.append("Interrupted: the last rows hold what had ended by then.")
    parts.append(_steps(summary["steps"]))
    if summary["equal_ttft"]:
        parts.append(f"Throughput (requests/s) at equal median TTFT, and over {summary['reference']}'s:")
        parts.append(_equal(summary["equal_ttft"]))
    return "\n\n".join(parts) + "\n"


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "rate (1/s)",
        "target",
        "answered",
        "429",
        "failed",
        "TTFT median (s)",
        "TTFT p99 (s)",
        "throughput (1/s)",
        "tokens/s",
        "hit rate",
        "quality",
        "evicted",
    )
    rows = [
        (
            f"{step['rate_rps']:g}",
            step["target"],
            f"{step['answered']}/{step['requests']}",
            str(step["rejected"]),
            str(step["failed"]),
            _number(step["ttft_median_s"], 3),
            _number(step["ttft_p99_s"], 3),
            _number(step["throughput_rps"], 2),
            _number(step["tokens_per_s"], 1),
            _number(step["hit_rate"], 2),
            _number(step["quality"], 2),
            _number(step["evictions"], 0),
        )
        for step in steps
    ]
    return _table(head, rows)


def _equal(rows: Sequence[Mapping[str, Any]]) -> str:
    labels = list(rows[0]["targets"])
    body = [(_number(row["ttft_median_s"], 3), *(_reached(row["targets"][label]) for label in labels)) for row in rows]
    return _table(("TTFT median (s)", *labels), body)


def _reached(found: Mapping[str, Any]) -> str:
    if found["throughput_rps"] is None:
        return "not reached"
    over = "" if found["over_reference"] is None else f" ({found['over_reference']:.2f}x)"
    return f"{'at least ' if found['at_least'] else ''}{found['throughput_rps']:.2f}{over}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


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

    Between two points both are taken to change in a straight line. After the first point that is above, later ones do not
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
