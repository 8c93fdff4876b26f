"""Seconds to the first logits of several requests that wait together (paper figure 15c)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from cacheblend.blend import FusionConfig, Fusor
from cacheblend.eval.methods import DEFAULT_RATIO, ResidentRequest

from .figure_file import new_figure, save_figure
from .stopwatch import Call, median_seconds

BATCHES = (1, 2, 4, 8)


def measure_batches(fusor: Fusor, resident: ResidentRequest) -> dict[tuple[str, int], float]:
    """Seconds by method and number of requests: full recompute takes them as one batch, blending one after the other."""
    segments = resident.blend_segments()
    ids_1N = torch.tensor([resident.pieces.token_ids], device=fusor.decoder.device)

    @torch.no_grad()
    def full(batch: int) -> None:
        fusor.model(ids_1N.expand(batch, -1), use_cache=True, logits_to_keep=1)

    def blend(batch: int) -> None:
        for _ in range(batch):
            fusor.fuse(segments, FusionConfig(recompute_ratio=DEFAULT_RATIO))

    runs = (("full_recompute", full), ("blend", blend))
    calls = {(name, batch): Call(partial(run, batch)) for batch in BATCHES for name, run in runs}
    return median_seconds(calls, fusor.decoder.device)


def draw_batches(folder: Path, name: str, seconds: Mapping[tuple[str, int], float]) -> Path:
    """A line a method over the number of requests."""
    figure, (axis,) = new_figure()
    for method in dict.fromkeys(method for method, _ in seconds):
        axis.plot(BATCHES, [seconds[method, batch] for batch in BATCHES], marker="o", label=method)
    axis.set_xlabel("requests at once")
    axis.set_ylabel("prefill of all, median (s)")
    axis.legend()
    rows = [(method, batch, value) for (method, batch), value in seconds.items()]
    return save_figure(folder, name, figure, ("method", "requests", "prefill_s"), rows)
