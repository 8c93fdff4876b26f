"""What a run's rows say, by method and class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cacheblend.base.errors import InputError
from cacheblend.eval.metrics import paired_difference

from .folder import Row, RunFolder

REFERENCE = "full_recompute"
ALL = "all"
WITHHELD = "the model's weights are random, so its answers have no quality to report"
UNKNOWN = "no question came with a right answer"
# What full recompute has in the metrics that are taken against it, case by case.
AGAINST_FULL = {"first_token_kl_nats": 0.0, "gold_nll_over_full_nats": 0.0, "equal_greedy_tokens": 1.0}


def summarize(run: RunFolder) -> dict[str, Any]:
    """The summary of a run.

    Returns:
        `methods.<method>.<class>` for the class "all" and each of the data set's: `cases`; the task's metrics (`f1` and `em`,
        or `rouge_l`; null where the weights are random) and `<first metric>_difference` from full recompute with its 95 %
        interval; `first_token_kl_nats`, `gold_nll_over_full_nats`, `equal_greedy_tokens`, each with a `_difference` as well;
        `ttft_s_median`, `ttft_s_p95`; means of `recomputed_tokens`, `loaded_bytes`, `prompt_tokens`, `deviation_left`,
        `gold_nll_nats` and `compute_share`. A mean is over the cases that have the value, None where none has. Beside it the
        data set, the model, `weights`, and how many cases were cut.

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
    elif all(value is None for row in rows for result in row["methods"].values() for value in result["quality"].values()):
        summary["quality"] = UNKNOWN
    return summary


def _summary(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    results = [row["methods"][label] for row in rows]
    ttft_s = [result["ttft_s"] for result in results]
    return {
        "cases": len(rows),
        **_quality(label, rows),
        **_against_full(label, results),
        "ttft_s_median": float(np.median(ttft_s)),
        "ttft_s_p95": float(np.percentile(ttft_s, 95)),
        "prompt_tokens": float(np.mean([row["prompt_tokens"] for row in rows])),
        "recomputed_tokens": float(np.mean([result["recomputed_tokens"] for result in results])),
        "loaded_bytes": float(np.mean([result["loaded_bytes"] for result in results])),
        **{name: _mean(_known(results, name)) for name in ("deviation_left", "gold_nll_nats", "compute_share")},
    }


def _quality(label: str, rows: Sequence[Row]) -> dict[str, Any]:
    marked = [row for row in rows if None not in row["methods"][label]["quality"].values()]
    metrics = list(rows[0]["methods"][label]["quality"])
    if not marked:
        return dict.fromkeys(metrics)
    by_metric = {name: [row["methods"][label]["quality"][name] for row in marked] for name in metrics}
    found: dict[str, Any] = {name: float(np.mean(values)) for name, values in by_metric.items()}
    if REFERENCE in rows[0]["methods"] and label != REFERENCE:
        metric = metrics[0]
        full = [row["methods"][REFERENCE]["quality"][metric] for row in marked]
        found[f"{metric}_difference"] = asdict(paired_difference(by_metric[metric], full))
    return found


def _against_full(label: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the metrics that are taken against full recompute in every case, with the intervals of their differences."""
    found: dict[str, Any] = {}
    for name, full in AGAINST_FULL.items():
        values = _known(results, name)
        found[name] = _mean(values)
        if values and label != REFERENCE:
            found[f"{name}_difference"] = asdict(paired_difference(values, [full] * len(values)))
    return found


def _known(results: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A metric's values; rows of runs that had it not yet are left out."""
    return [result[name] for result in results if result.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
