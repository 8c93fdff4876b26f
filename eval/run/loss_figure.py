"""A picture of what is lost against time: first-token KL over TTFT, with its data as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend.base.extras import needs_extra

from .report import REFERENCE


def draw_losses(folder: Path, name: str, summaries: Sequence[dict[str, Any]]) -> Path:
    """Draw first-token KL from full recompute against TTFT: a panel a run, a line a method over its ratios.

    Args:
        folder: where `name.png` and `name.csv` are written.
        name: of the files.
        summaries: of runs that have full_recompute, which a dashed line stands for.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("eval"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(5.5 * len(summaries), 4.0), layout="constrained")
    axes = figure.subplots(1, len(summaries), squeeze=False)[0]
    rows: list[tuple[object, ...]] = []
    for axis, summary in zip(axes, summaries, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for label, found in summary["methods"].items():
            ttft_s, kl_nats = found["ttft_s_median"], found["first_token_kl_nats"]
            rows.append((Path(summary["model"]).name, summary["data_set"], label, ttft_s, found["compute_share"], kl_nats))
            if label == REFERENCE:
                axis.axvline(ttft_s, linestyle="--", color="gray", label=REFERENCE)
            else:
                lines.setdefault(label.partition("@")[0], []).append((ttft_s, kl_nats))
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.grid(alpha=0.3)
        axis.set_yscale("log")
        axis.set_xlabel("TTFT, median (s)")
        axis.set_ylabel("KL of the first token (nats)")
        axis.set_title(f"{Path(summary['model']).name}, {summary['data_set']}, {summary['cases']} cases", fontsize="medium")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    header = ("model", "data_set", "method", "ttft_s_median", "compute_share", "first_token_kl_nats")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    png = folder / f"{name}.png"
    figure.savefig(png, dpi=150)
    return png
