"""A load run as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheblend.base.errors import InputError
from cacheblend.eval.run.folder import SUMMARY, RunFolder


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
