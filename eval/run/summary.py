"""What a run's rows say, by method and class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cacheblend.eval.metrics import paired_difference
from cacheblend.store.errors import InputError

from .folder import Row, RunFolder

REFERENCE = "full_recompute"
ALL = "all"
WITHHELD = "the model's weights are random, so its answers have no quality to report"


def summarize(run: RunFolder) -> dict[str, Any]:
    """The summary of a run.

    Returns:
        `methods.<method>.<class>` for the class "all" and each of the data set's: `cases`; the task's metrics (`f1` and `em`,
        or `rouge_l`; null where the weights are random) and `<first metric>_difference` from full recompute with its 95 %
        interval; `ttft_s_median`, `ttft_s_p95`; means of `recomputed_tokens`, `loaded_bytes`, `prompt_tokens` and
        `deviation_left`. Beside it the data set, the model, `weights`, and how many cases were cut.

    Raises:
        InputError: the folder is no run, or has no whole case.
    """
    setup, rows = run.setup(), run.rows()
    if not rows:
        raise InputError(f"{run.path} holds no whole case yet; go on with it by --resume")
    classes = {ALL: rows}
    for row in rows:
        if row["class"]:
            classes.setdefault(row["class"], []).append(row)
    summary = {
        "run": str(run.path),
        "data_set": setup["config"]["source"]["data_set"],
        "model": setup["config"]["model"],
        "weights": setup["weights"],
        "device": setup["device"],
        "threads": setup["threads"],
        "cases": len(rows),
        "cases_cut": sum(row["cut_tokens"] > 0 for row in rows),
        "methods": {
            label: {name: _summary(label, of_class) for name, of_class in classes.items()} for label in rows[0]["methods"]
        },
    }
    if setup["weights"] == "random":
        summary["quality"] = WITHHELD
    return summary


def _summary(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    results = [row["methods"][label] for row in rows]
    ttft_s = [result["ttft_s"] for result in results]
    deviations = [result["deviation_left"] for result in results if result["deviation_left"] is not None]
    return {
        "cases": len(rows),
        **_quality(label, rows),
        "ttft_s_median": float(np.median(ttft_s)),
        "ttft_s_p95": float(np.percentile(ttft_s, 95)),
        "prompt_tokens": float(np.mean([row["prompt_tokens"] for row in rows])),
        "recomputed_tokens": float(np.mean([result["recomputed_tokens"] for result in results])),
        "loaded_bytes": float(np.mean([result["loaded_bytes"] for result in results])),
        "deviation_left": float(np.mean(deviations)) if deviations else None,
    }


def _quality(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    qualities = [row["methods"][label]["quality"] for row in rows]
    if None in qualities[0].values():
        return dict.fromkeys(qualities[0])
    found: dict[str, Any] = {name: float(np.mean([quality[name] for quality in qualities])) for name in qualities[0]}
    if REFERENCE in rows[0]["methods"] and label != REFERENCE:
        metric = next(iter(qualities[0]))
        full = [row["methods"][REFERENCE]["quality"][metric] for row in rows]
        difference = paired_difference([quality[metric] for quality in qualities], full)
        found[f"{metric}_difference"] = asdict(difference)
    return found
