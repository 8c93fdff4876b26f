"""Measures what reading a chunk's layer costs from each tier, with the loader itself and at the sizes that it reads."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from cacheblend.base.files import make_folder
from cacheblend.blend import KVGeometry, Prompt, Segment
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig

from .config import LoaderConfig
from .layer_loader import LayerLoader
from .profile import TierSpeed

CHUNKS = 6
MODEL = "tier-speed"
MOST_BYTES = 512 * 2**20


def measure_tiers(
    geometry: KVGeometry, directory: Path, config: LoaderConfig, *, chunk_tokens: int, repeats: int
) -> dict[str, TierSpeed]:
    """Speed of the tiers "ram" and "nvme", from loads of whole prompts of two chunk sizes with nothing computed beside them.

    NVMe is read with the page cache dropped, as after a start; what a running store reads from the cache is sooner.

    Args:
        geometry: of the model's KV.
        directory: a folder on the disk to measure; what is written there is removed.
        config: reads in flight and look-ahead.
        chunk_tokens: the larger chunk size; the smaller is an eighth of it.
        repeats: loads of each size; the median counts.
    """
    make_folder(directory)
    fits = max(1, MOST_BYTES // (CHUNKS * geometry.layers * geometry.layer_bytes(1)))
    sizes = sorted({max(1, min(chunk_tokens, fits) // 8), min(chunk_tokens, fits)})
    read_s: dict[str, list[float]] = {"ram": [], "nvme": []}
    for tokens in sizes:
        with tempfile.TemporaryDirectory(dir=directory, prefix="tier-speed-") as scratch:
            for tier, took_s in _read_s(geometry, Path(scratch), config, tokens, repeats).items():
                read_s[tier].append(took_s)
    read_bytes = [geometry.layer_bytes(tokens) for tokens in sizes]
    return {tier: _speed(read_bytes, seconds) for tier, seconds in read_s.items()}


def _speed(read_bytes: list[int], seconds: list[float]) -> TierSpeed:
    """The line through both sizes; without a constant where that would be below 0."""
    small, large, small_s, large_s = read_bytes[0], read_bytes[-1], seconds[0], seconds[-1]
    if small == large or large_s / large >= small_s / small:
        return TierSpeed(read_s=0.0, bytes_per_s=large / large_s)
    slope = (large_s - small_s) / (large - small)
    if slope <= 0:  # noise: more bytes were read sooner
        return TierSpeed(read_s=0.0, bytes_per_s=large / large_s)
    return TierSpeed(read_s=max(0.0, small_s - slope * small), bytes_per_s=1 / slope)


def _read_s(geometry: KVGeometry, scratch: Path, config: LoaderConfig, tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of one read, by tier."""
    shape = (geometry.kv_heads, tokens, geometry.head_dim)
    layer = tuple(torch.randn(shape, dtype=torch.float32).to(geometry.dtype) for _ in "kv")
    ids = [[number] * tokens for number in range(CHUNKS)]
    keys = [ChunkKey.of(chunk, model=MODEL) for chunk in ids]
    seconds: dict[str, list[float]] = {"ram": [], "nvme": []}
    with KVStore(StoreConfig(directory=scratch / "kv", ram_budget_bytes=2 * MOST_BYTES)) as store:
        for key, chunk in zip(keys, ids, strict=True):
            store.put(key, ChunkKV([(layer[0], layer[1])] * geometry.layers, chunk, (), MODEL))
        for _ in range(repeats + 1):
            seconds["ram"].append(_load_s(store, keys, geometry, config))
    for _ in range(repeats + 1):
        drop_page_cache(path for path in (scratch / "kv").rglob("*") if path.is_file())
        with KVStore(StoreConfig(directory=scratch / "kv", ram_budget_bytes=1)) as store:
            seconds["nvme"].append(_load_s(store, keys, geometry, config))
    reads = CHUNKS * geometry.layers
    return {tier: statistics.median(took_s[1:]) / reads for tier, took_s in seconds.items()}


def _load_s(store: KVStore, keys: list[ChunkKey], geometry: KVGeometry, config: LoaderConfig) -> float:
    """Seconds to load every layer of all chunks."""
    with store.pin(keys) as placements, LayerLoader(config) as loader:
        found = [placement for placement in placements if placement is not None]
        prompt = Prompt.of([*(Segment(placement.token_ids, placement) for placement in found), Segment([0])])
        started = time.perf_counter()
        loader.start(prompt, geometry, reuse_layer_0=True)
        for layer in range(geometry.layers):
            loader.synchronize(layer)
        if geometry.device.type == "cuda":
            torch.cuda.synchronize(geometry.device)
        return time.perf_counter() - started


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Have the system forget its copies of files that are on disk; does nothing on macOS, which cannot."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
