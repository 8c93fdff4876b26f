"""Quality against TTFT by method (paper figures 12 and 13), and by recompute ratio (figure 16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend.eval.run.report import metric_of
from cacheblend.eval.run.summary import ALL, REFERENCE

from .figure_file import new_figure, save_figure

MAP_METHODS = ("map_reduce", "map_rerank")


def draw_methods(folder: Path, name: str, summary: dict[str, Any], *, with_map_methods: bool) -> Path:
    """A point a method: up and to the left is better.

    Args:
        folder: where to.
        name: of the files.
        summary: of a run with quality.
        with_map_methods: also MapReduce and MapRerank (figure 13), whose TTFT is of another size.
    """
    metric = metric_of(summary)
    shown = [label for label in summary["methods"] if with_map_methods or label not in MAP_METHODS]
    figure, (axis,) = new_figure()
    rows = []
    for label in shown:
        found = summary["methods"][label][ALL]
        rows.append((label, found["ttft_s_median"], found["ttft_s_p95"], found[metric]))
        axis.scatter(found["ttft_s_median"], found[metric], s=50, label=label)
    axis.set_xlabel("TTFT, median (s)")
    axis.set_ylabel(str(metric))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axis.set_title(f"{summary['data_set']}, {summary['cases']} cases")
    if with_map_methods:
        axis.set_xscale("log")
    return save_figure(folder, name, figure, ("method", "ttft_s_median", "ttft_s_p95", metric or ""), rows)


def draw_ratios(folder: Path, name: str, summary: dict[str, Any], ratios: list[float]) -> Path:
    """TTFT, and quality where the run has it, of `blend` over the ratio, with full recompute's as a line.

    Args:
        folder: where to.
        name: of the files.
        summary: of a run of blend at several ratios, random_tokens at the same, and full_recompute.
        ratios: those ratios.
    """
    metric = metric_of(summary)
    measures = [("ttft_s_median", "TTFT, median (s)"), *([(metric, metric)] if metric else [])]
    figure, axes = new_figure(len(measures))
    methods = summary["methods"]
    for axis, (key, title) in zip(axes, measures, strict=True):
        for label in ("blend", "random_tokens"):
            axis.plot(ratios, [methods[f"{label}@{ratio}"][ALL][key] for ratio in ratios], marker="o", label=label)
        axis.axhline(methods[REFERENCE][ALL][key], linestyle="--", color="gray", label=REFERENCE)
        axis.set_xlabel("recompute ratio")
        axis.set_ylabel(title)
        axis.legend()
    header = ["method", "ratio", *(key for key, _ in measures)]
    rows: list[list[object]] = [
        [label, ratio, *(methods[f"{label}@{ratio}"][ALL][key] for key, _ in measures)]
        for label in ("blend", "random_tokens")
        for ratio in ratios
    ]
    rows.append([REFERENCE, "", *(methods[REFERENCE][ALL][key] for key, _ in measures)])
    return save_figure(folder, name, figure, header, rows)
