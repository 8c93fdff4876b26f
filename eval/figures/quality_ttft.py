"""Quality against TTFT by method (paper figures 12 and 13), by recompute ratio (figure 16), and what is lost against TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend.eval.run.report import ALL, REFERENCE, metric_of

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


def draw_losses(folder: Path, name: str, summaries: Sequence[dict[str, Any]]) -> Path:
    """First-token KL from full recompute against TTFT: a panel a run, a line a method over its ratios; down and left is better.

    Args:
        folder: where to.
        name: of the files.
        summaries: of runs that have full_recompute, which a dashed line stands for.
    """
    figure, axes = new_figure(len(summaries))
    rows: list[tuple[object, ...]] = []
    for axis, summary in zip(axes, summaries, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for label, of_class in summary["methods"].items():
            found = of_class[ALL]
            ttft_s, kl_nats = found["ttft_s_median"], found["first_token_kl_nats"]
            rows.append((Path(summary["model"]).name, summary["data_set"], label, ttft_s, found["compute_share"], kl_nats))
            if label == REFERENCE:
                axis.axvline(ttft_s, linestyle="--", color="gray", label=REFERENCE)
            elif kl_nats is not None:  # MapReduce and MapRerank answer from other prompts
                lines.setdefault(label.partition("@")[0], []).append((ttft_s, kl_nats))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set_yscale("log")
        axis.set_xlabel("TTFT, median (s)")
        axis.set_ylabel("KL of the first token (nats)")
        axis.set_title(f"{Path(summary['model']).name}, {summary['data_set']}, {summary['cases']} cases", fontsize="medium")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    header = ("model", "data_set", "method", "ttft_s_median", "compute_share", "first_token_kl_nats")
    return save_figure(folder, name, figure, header, rows)
