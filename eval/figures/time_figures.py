"""Seconds to the first logits of several requests that wait together (paper figure 15c)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from cacheblend.blend import DEFAULT_RATIO, FusionConfig, Fusor, Segment
from cacheblend.eval.methods.method import ResidentRequest
from cacheblend.loader import LayerLoader
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig

from .figure_file import Call, median_seconds, new_figure, save_figure

BATCHES = (1, 2, 4, 8)


def measure_batches(fusor: Fusor, resident: ResidentRequest) -> dict[tuple[str, int], float]:
    """Seconds by method and number of requests: full recompute takes them as one batch, blending one after the other."""
    segments = resident.blend_segments()
    ids_1N = torch.tensor([resident.prompt.token_ids], device=fusor.decoder.device)

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


METHODS = {"full_reuse": 0.0, "blend": DEFAULT_RATIO}
FULL = ("full_recompute", "none")


def measure_tiers(fusor: Fusor, resident: ResidentRequest) -> dict[tuple[str, str], float]:
    """Seconds by method and tier, and of full recompute, which loads nothing.

    A store whose RAM budget is one byte keeps all on NVMe; its files are dropped from the page cache before every round.
    """
    chunks = {_key(kv): kv for kv in resident.chunk_kv() if kv is not None}
    budgets = {"ram": 1 + 2 * sum(kv.nbytes for kv in chunks.values()), "nvme": 1}
    calls = {FULL: Call(lambda: fusor.prefill(resident.prompt.token_ids))}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cacheblend-figures-")))
        for tier, budget in budgets.items():
            store = opened.enter_context(KVStore(StoreConfig(directory=folder / tier, ram_budget_bytes=budget)))
            for key, kv in chunks.items():
                store.put(key, kv)
                store.get(key)  # into RAM, where the budget allows
            before = partial(_drop_pages, folder / tier) if tier == "nvme" else _nothing
            for name, ratio in METHODS.items():
                calls[name, tier] = Call(partial(_fuse_from, store, fusor, resident, ratio), before)
        return median_seconds(calls, fusor.decoder.device)


def draw_tiers(folder: Path, name: str, seconds: Mapping[tuple[str, str], float]) -> Path:
    """Bars by tier, with full recompute as a line."""
    figure, (axis,) = new_figure()
    tiers = ("ram", "nvme")
    for index, method in enumerate(METHODS):
        places = [place + 0.35 * index for place in range(len(tiers))]
        axis.bar(places, [seconds[method, tier] for tier in tiers], width=0.3, label=method)
    axis.axhline(seconds[FULL], linestyle="--", color="gray", label=FULL[0])
    axis.set_xticks([place + 0.175 for place in range(len(tiers))], ["RAM", "NVMe"])
    axis.set_ylabel("prefill, median (s)")
    axis.legend()
    rows = [(method, tier, value) for (method, tier), value in seconds.items()]
    return save_figure(folder, name, figure, ("method", "tier", "prefill_s"), rows)


def _fuse_from(store: KVStore, fusor: Fusor, resident: ResidentRequest, ratio: float) -> None:
    segments = resident.blend_segments()
    reused = [segment.kv for segment in segments if isinstance(segment.kv, ChunkKV) and not segment.exact]
    with store.pin([_key(kv) for kv in reused]) as placements, LayerLoader() as loader:
        found = iter(placements)
        placed = [
            Segment(segment.token_ids, next(found)) if segment.kv is not None and not segment.exact else segment
            for segment in segments
        ]
        fusor.fuse(placed, FusionConfig(recompute_ratio=ratio), loader)


def _key(kv: ChunkKV) -> ChunkKey:
    assert kv.model is not None
    return ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, context=kv.context, model=kv.model)


def _drop_pages(folder: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return  # macOS has none: the figure then shows reads through the page cache
    for file in (folder / "entries").rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _nothing() -> None:
    """Entries in RAM need nothing."""
