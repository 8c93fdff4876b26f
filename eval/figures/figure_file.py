"""A figure on disk: the PNG and the CSV that it was drawn from."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cacheblend.base.extras import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Sequence[Sequence[object]]


def new_figure(panels: int = 1) -> tuple[Figure, list[Any]]:
    """An empty figure with its panels side by side. No window and no global state: pyplot is not used.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("eval"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(5.5 * panels, 4.0), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save_figure(folder: Path, name: str, figure: Figure, header: Sequence[str], rows: Table) -> Path:
    """Write `name.png` and `name.csv`; gives the PNG's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    png = folder / f"{name}.png"
    figure.savefig(png, dpi=150)
    return png


ROUNDS = 5
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Call:
    """Work that is timed, and what is done before each time, untimed."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def median_seconds(calls: Mapping[Key, Call], device: torch.device) -> dict[Key, float]:
    """The median of `ROUNDS` interleaved rounds, after one that does not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS + 1):
        for key, call in calls.items():
            call.before()
            _settle(device)
            started = time.perf_counter()
            call.run()
            _settle(device)
            seconds[key].append(time.perf_counter() - started)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
