"""Runs as Markdown, a table for each and one side by side; and pictures of losses against compute, and of times."""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cacheblend.base.errors import InputError, needs_extra
from cacheblend.eval.metrics import paired_difference

from .folder import Row, RunFolder

REFERENCE = "full_recompute"
WITHHELD = "the model's weights are random, so its answers have no quality to report"
UNKNOWN = "no question came with a right answer"
FEWEST_OF_ORACLE, BOUNDS_OF_ORACLE = 3, (0.3, 0.1, 0.05, 0.02, 0.01)  # ratios that it chooses from; nats
# What full recompute has in the metrics that are taken against it, case by case.
AGAINST_FULL = {"first_token_kl_nats": 0.0, "gold_nll_over_full_nats": 0.0, "equal_greedy_tokens": 1.0}


def summarize(run: RunFolder) -> dict[str, Any]:
    """The summary of a run.

    Returns:
        `methods.<method>`: `cases`; the task's metrics (`f1` and `em`, or `rouge_l`; null where the weights are random) and
        `<first metric>_difference` from full recompute with its 95 % interval; `first_token_kl_nats`,
        `gold_nll_over_full_nats`, `equal_greedy_tokens`, each with a `_difference` as well; `ttft_s_median`, `ttft_s_p95`;
        means of `recomputed_tokens`, `loaded_bytes`, `prompt_tokens`, `relative_kv_error`, `gold_nll_nats` and
        `compute_share`; `widened_share` of the cases. A mean is over the cases that have the value, None where none has.
        Beside it the data set, the model, `weights`, and how many cases were cut.

    Raises:
        InputError: the folder is no run, or has no complete case.
    """
    setup, rows = run.setup(), run.rows()
    if not rows:
        raise InputError(f"{run.path} holds no complete case yet; go on with it by --resume")
    summary = {
        "run": str(run.path),
        "data_set": setup["config"]["source"]["data_set"],
        "model": setup["config"]["model"],
        "weights": setup["weights"],
        "device": setup["device"],
        "threads": setup["threads"],
        "cases": len(rows),
        "cases_cut": sum(row["cut_tokens"] > 0 for row in rows),
        "methods": {label: _summary(label, rows) for label in rows[0]["methods"]},
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
        **{name: _mean(_known(results, name)) for name in ("relative_kv_error", "gold_nll_nats", "compute_share")},
        "widened_share": _mean(_known(results, "is_widened")),
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


def report(folders: Sequence[Path]) -> str:
    """Markdown tables of the runs, also of one that is not complete; with several, one more that compares them.

    Raises:
        InputError: a folder is no run, or has no complete case.
    """
    summaries = [summarize(RunFolder(folder)) for folder in folders]
    parts = [_run(summary) for summary in summaries]
    if len(summaries) > 1:
        parts.append(_comparison(summaries))
    return "\n\n".join(parts) + "\n"


def _run(summary: dict[str, Any]) -> str:
    lines = [
        f"## {summary['run']}",
        "",
        f"{summary['data_set']}, {summary['cases']} cases ({summary['cases_cut']} cut to the model's context), model "
        f"{summary['model']}, {summary['device']}, {summary['threads']} threads.",
    ]
    if "quality" in summary:
        lines.append(f"Quality is left out: {summary['quality']}.")
    methods, metric = summary["methods"], metric_of(summary)
    lines += ["", *_table(_HEADER if metric is None else [*_HEADER, metric, "difference (95 %)"], _rows(methods, metric))]
    return "\n".join(lines)


_HEADER = [
    "method",
    "TTFT median s",
    "p95 s",
    "speed-up",
    "tokens recomputed",
    "compute",
    "MB loaded",
    "relative KV error",
    "KL nats (95 %)",
    "NLL over full (95 %)",
    "equal tokens",
]


def _rows(methods: dict[str, Any], metric: str | None) -> Iterable[list[str]]:
    full_s = methods[REFERENCE]["ttft_s_median"] if REFERENCE in methods else None
    for label, found in methods.items():
        row = [
            label,
            _number(found["ttft_s_median"], 4),
            _number(found["ttft_s_p95"], 4),
            "" if full_s is None else f"{full_s / found['ttft_s_median']:.2f} x",
            f"{found['recomputed_tokens']:,.0f} of {found['prompt_tokens']:,.0f}",
            _number(found["compute_share"]),
            _number(found["loaded_bytes"] / 1e6, 1),
            _number(found["relative_kv_error"], 4),
            _with_interval(found, "first_token_kl_nats"),
            _with_interval(found, "gold_nll_over_full_nats", sign="+"),
            _number(found["equal_greedy_tokens"], 2),
        ]
        if metric is not None:
            row += [_number(found[metric]), _difference(found.get(f"{metric}_difference"))]
        yield row


def _comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """Methods of several runs side by side, each with its quality and TTFT over all cases."""
    labels = list(dict.fromkeys(label for summary in summaries for label in summary["methods"]))
    rows = []
    for label in labels:
        row = [label]
        for summary in summaries:
            found, metric = summary["methods"].get(label), metric_of(summary)
            row.append("" if found is None else f"{_number(found['ttft_s_median'], 4)} s")
            row.append("" if found is None or metric is None else f"{_number(found[metric])} {metric}")
        rows.append(row)
    header = ["method"]
    for summary in summaries:
        name = Path(summary["run"]).name
        header += [f"{name}: TTFT", f"{name}: quality"]
    return "\n".join(["## Side by side", "", *_table(header, rows)])


def metric_of(summary: dict[str, Any]) -> str | None:
    """The metric that a run's methods are compared by; None where its quality is withheld."""
    found = next(iter(summary["methods"].values()))
    return next((metric for metric in ("f1", "rouge_l") if found.get(metric) is not None), None)


def _difference(found: dict[str, float | None] | None) -> str:
    if found is None:
        return ""
    mean, low, high = found["mean"], found["low"], found["high"]
    interval = "" if low is None or high is None else f" ({low:+.3f} to {high:+.3f})"
    return f"{mean:+.3f}{interval}"


def _with_interval(found: dict[str, Any], name: str, sign: str = "") -> str:
    """A metric that is 0 for full recompute, with the interval of its difference from that."""
    if found[name] is None:
        return ""
    difference = found.get(f"{name}_difference") or {}
    low, high = difference.get("low"), difference.get("high")
    interval = "" if low is None or high is None else f" ({low:{sign}.3f} to {high:{sign}.3f})"
    return f"{found[name]:{sign}.3f}{interval}"


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


Point = tuple[str, str, float, float]  # a panel's title, a line's name, x, y


def draw_lines(
    png: Path, points: Sequence[Point], *, x: str = "", y: str = "", log_x: bool = False, log_y: bool = False
) -> None:
    """Draw lines over one or more panels, and write the points as CSV beside the picture.

    Args:
        png: where the picture is written.
        points: of all lines.
        x: name of the x axes; if it is empty, a panel's title is the name of its own.
        y: name of the y axes; if it is empty, a panel's title is the name of its own.
        log_x: the x axes are logarithmic.
        log_y: the y axes are logarithmic.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("eval"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    panels, lines = (list(dict.fromkeys(point[column] for point in points)) for column in (0, 1))
    height = 4.0 + 0.2 * len(lines) / len(panels)
    figure = Figure(figsize=(max(5.5 * len(panels), 7.0), height), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=bool(x and y))[0]
    for panel, axis in zip(panels, axes, strict=True):
        drawn = [point for point in points if point[0] == panel]
        for number, line in enumerate(lines):
            at = sorted(point[2:] for point in drawn if point[1] == line)
            axis.plot(
                [place for place, _ in at], [value for _, value in at], f"C{number}", marker="o", markersize=3, label=line
            )
        axis.set(xlabel=x or panel, ylabel=y or panel, title=panel if x and y else "")
        if log_x:
            places = sorted({point[2] for point in drawn})
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            if 2 * len(places) <= len(drawn):  # lines share them
                axis.set_xticks(places, [f"{place:g}" for place in places])
        if log_y:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        if log_x or log_y:
            axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(panels))
    png.parent.mkdir(parents=True, exist_ok=True)
    with png.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        rounded = ((panel, line, round(place, 6), round(value, 6)) for panel, line, place, value in points)
        csv.writer(file, lineterminator="\n").writerows([("panel", "line", x or "x", y or "y"), *rounded])
    figure.savefig(png, dpi=110)


def draw_losses(folder: Path, name: str, runs: Sequence[RunFolder]) -> Path:
    """Draw first-token KL and quality against compute, and quality against TTFT (the paper's figures 16 and 12).

    A column is a run, a line a method over its ratios. A method at three ratios or more has an oracle, which gives each case
    the least ratio whose KL is within a bound, and full recompute where none is: what the best choice of a ratio could reach.

    Args:
        folder: where `name.png` and `name.csv` are written.
        name: of the files.
        runs: those that are drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("eval"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(5.5 * len(runs) + 1, 10.0), layout="constrained")
    axes = figure.subplots(3, len(runs), squeeze=False)
    points: list[tuple[object, ...]] = []
    for column, run in zip(axes.T, runs, strict=True):
        upper, middle, lower = column
        summary = summarize(run)
        metric, data_set = metric_of(summary), summary["data_set"]
        model = re.sub("-[0-9a-f]{16}$", "", Path(summary["model"]).name)  # a known model's folder has a digest
        for label, at in _lines(summary, run.rows(), metric).items():
            at.sort()
            points += [(model, data_set, label, *point) for point in at]
            compute, kl_nats, quality, ttft_s = zip(*at, strict=True)
            for axis, x, y in ((upper, compute, kl_nats), (middle, compute, quality), (lower, ttft_s, quality)):
                axis.plot(x, y, ":" if label.endswith("oracle") else "-", marker=".", label=label)
        upper.set_yscale("symlog", linthresh=0.01)
        upper.set_title(f"{model}, {data_set}, {summary['cases']} cases", fontsize="medium")
        compute_label, quality_label = "compute, share of full prefill's", metric or "quality"
        upper.set(xlabel=compute_label, ylabel="KL of the first token (nats)")
        middle.set(xlabel=compute_label, ylabel=quality_label)
        lower.set(xlabel="TTFT, mean (s)", ylabel=quality_label)
        for axis in column:
            axis.set_xscale("log")
            axis.tick_params(axis="x", which="minor", labelbottom=False)
            axis.grid(alpha=0.3)
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("model", "data_set", "method", "compute_share", "first_token_kl_nats", "quality", "ttft_s"), *points]
        )
    png = folder / f"{name}.png"
    figure.savefig(png, dpi=110)
    return png


_Point = tuple[float, float, float | None, float]


def _lines(summary: dict[str, Any], rows: Sequence[Row], metric: str | None) -> dict[str, list[_Point]]:
    """Points of compute, KL, quality and TTFT in the mean, by method; and those of each method's oracle."""
    found: dict[str, list[_Point]] = {}
    ratios: dict[str, list[str]] = {}
    for label, one in summary["methods"].items():
        method = label.partition("@")[0]
        ttft_s = float(np.mean([row["methods"][label]["ttft_s"] for row in rows]))
        point = (one["compute_share"], one["first_token_kl_nats"], one.get(metric or ""), ttft_s)
        found.setdefault(method, []).append(point)
        ratios.setdefault(method, []).append(label)
    for method, labels in ratios.items():
        if len(labels) < FEWEST_OF_ORACLE or REFERENCE not in summary["methods"]:
            continue
        labels = sorted(labels, key=lambda label: float(summary["methods"][label]["compute_share"]))
        for most_nats in BOUNDS_OF_ORACLE:
            taken = [_least(row, [*labels, REFERENCE], most_nats) for row in rows]
            known = [] if metric is None else [one["quality"][metric] for one in taken if one["quality"][metric] is not None]
            quality = float(np.mean(known)) if known else None
            names = ("compute_share", "first_token_kl_nats", "ttft_s")
            compute, kl_nats, ttft_s = (float(np.mean([one[name] for one in taken])) for name in names)
            found.setdefault(f"{method}, oracle", []).append((compute, kl_nats, quality, ttft_s))
    return found


def _least(row: Row, labels: Sequence[str], most_nats: float) -> dict[str, Any]:
    """A case's result by the first method whose KL is within a bound; the last one's is 0."""
    results: list[dict[str, Any]] = [row["methods"][label] for label in labels]
    return next(result for result in results if result["first_token_kl_nats"] <= most_nats)
