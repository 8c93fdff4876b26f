"""Measurements for a profile: full prefills, layers of blends, and each tier's reads with the loader itself (paper §5.1)."""

import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from cacheblend.base.errors import ConfigError, StoreError
from cacheblend.base.files import make_folder
from cacheblend.base.threads import Note
from cacheblend.blend import FusionConfig, Fusor, KVGeometry, LayerKV, Prompt, Segment
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig

from .config import LENGTHS, LoaderConfig
from .estimators import work_of
from .layer_loader import LayerLoader
from .profile import LayerSample, PrefillSample, Profile, TierSpeed, describe_device

logger = logging.getLogger(__name__)
# Of the tiers: chunks of a prompt, the model that they are of, and the largest prompt.
CHUNKS, MODEL, MAX_BYTES = 6, "tier-speed", 512 * 2**20
RATIOS = (0.05, 0.15, 0.5, 1.0)
REPEATS = 3
QUESTION_TOKENS = 32
# Layers of a blend that are timed; later ones repeat them: layer 0 runs all rows, layer 1 projects every row and drops many,
# layer 2 does not check, layer 3 does again.
LAYERS_TIMED = 5
PATIENCE_S = 2.0

Sample = TypeVar("Sample", PrefillSample, LayerSample)


def measure_profile(
    fusor: Fusor,
    directory: Path,
    config: LoaderConfig,
    *,
    chunk_tokens: int = 512,
    lengths: Sequence[int] | None = None,
    on_progress: Note = lambda *_: None,
) -> Profile:
    """Measure a model on its device, and the tiers of the disk that a folder is on, in seconds to minutes.

    The results are medians of `REPEATS` rounds after one warm-up, with the device synchronised. A round measures every length
    and ratio once, so that a disturbance of seconds does not slow all measurements of one length. Lengths beyond the model's
    positions are cut. Default lengths stop after one whose full prefill exceeded `PATIENCE_S`.

    Args:
        fusor: the model.
        directory: a folder on the disk of the store; files written there are removed.
        config: reads in flight and look-ahead of the loader.
        chunk_tokens: size of the reads.
        lengths: prompt lengths in tokens; None for `LENGTHS`.
        on_progress: called with "profile", measurements done, and measurements in all.

    Raises:
        ConfigError: a length is missing or below 1.
    """
    patience_s = PATIENCE_S if lengths is None else float("inf")
    lengths = LENGTHS if lengths is None else lengths
    if not lengths or min(lengths) < 1:
        raise ConfigError("lengths", tuple(lengths), "at least one, each of 1 token or more")
    limit = fusor.max_positions or max(lengths)
    lengths = sorted({min(length, limit) for length in lengths})
    prefill, blend = _measure_rounds(fusor, lengths, patience_s, on_progress)
    geometry = fusor.decoder.geometry
    profile = Profile(
        model=fusor.fingerprint,
        device=describe_device(geometry.device),
        layers=geometry.layers,
        layer_token_bytes=geometry.layer_bytes(1),
        prefill=prefill,
        blend=blend,
        logits_s=_logits_s(fusor),
        tiers=measure_tiers(geometry, directory, config, chunk_tokens=chunk_tokens),
    )
    steps = (REPEATS + 1) * len(prefill) + 1
    on_progress("profile", steps, steps)
    return profile


def _measure_rounds(
    fusor: Fusor, lengths: Sequence[int], patience_s: float, report: Note
) -> tuple[tuple[PrefillSample, ...], tuple[LayerSample, ...]]:
    """Medians of every length and ratio over the rounds; lengths after one whose prefill exceeded the patience are left out."""
    prefill: list[list[PrefillSample]] = []  # of each round
    blend: list[list[LayerSample]] = []
    for number in range(REPEATS + 1):  # the first one warms up
        prefill.append([])
        blend.append([])
        for at, tokens in enumerate(lengths):
            seconds = _seconds(partial(fusor.prefill, [0] * tokens), fusor)
            prefill[-1].append(PrefillSample(tokens=tokens, seconds=seconds))
            for ratio in RATIOS:
                blend[-1] += _blend_layers(fusor, tokens, ratio)
            report("profile", number * len(lengths) + at + 1, (REPEATS + 1) * len(lengths) + 1)
            if number == 0 and seconds > patience_s:
                break
        if left_out := lengths[len(prefill[-1]) :]:
            named = ", ".join(map(str, left_out))
            logger.warning("lengths %s were left out: a prefill of %d tokens took over %g s", named, tokens, patience_s)
        lengths = lengths[: len(prefill[-1])]
    return _medians(prefill[1:]), _medians(blend[1:])


def _logits_s(fusor: Fusor) -> float:
    with torch.no_grad():
        hidden_1SM = fusor.decoder.embed(torch.zeros(1, dtype=torch.long, device=fusor.decoder.device))
        return statistics.median([_seconds(partial(fusor.decoder.logits, hidden_1SM), fusor) for _ in range(REPEATS + 1)][1:])


@dataclass(frozen=True, slots=True)
class _LoadedLayers:
    """A source whose layers are in memory: only computing is timed."""

    layer_kvs: Sequence[LayerKV]

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Nothing is left to load."""

    def synchronize(self, layer: int) -> LayerKV:
        return self.layer_kvs[layer]


def _blend_layers(fusor: Fusor, tokens: int, ratio: float) -> list[LayerSample]:
    """The first layers of a blend."""
    question = max(1, min(QUESTION_TOKENS, tokens // 4))
    stored = [0] * (tokens - question)
    segments = [Segment([0] * question)]
    if stored:
        geometry = fusor.runner.geometry
        heads = map(geometry.heads, range(geometry.layers))  # one token's memory: only the compute is timed
        nothing = [
            (torch.empty((number, 1, size), dtype=geometry.dtype).expand(-1, len(stored), -1),) * 2 for number, size in heads
        ]
        segments.insert(0, Segment(stored, ChunkKV(nothing, stored, model=fusor.fingerprint)))
    samples: list[LayerSample] = []
    before, layers = 0, fusor.decoder.geometry.layers
    layer_kvs = [LayerKV.empty(fusor.decoder.geometry, tokens, layer) for layer in range(min(LAYERS_TIMED, layers))]
    for layer_kv in layer_kvs:
        layer_kv.kv_21HND.normal_()
    config, source = FusionConfig(recompute_ratio=ratio, selector="gradual"), _LoadedLayers(layer_kvs)
    with closing(fusor.fuse_steps(segments, config, source)) as steps:
        for layer in range(len(layer_kvs)):
            started = time.perf_counter()
            chosen = next(steps).recomputed
            _synchronize(fusor.decoder.device)
            seconds = time.perf_counter() - started
            rows, projected = work_of(layer, layers, before, chosen) if layer else (chosen, 0)
            samples.append(LayerSample(layer=layer, tokens=tokens, rows=rows, projected=projected, seconds=seconds))
            before = chosen
    return samples


def _medians(turns: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Each sample with the median of its seconds over all rounds."""
    return tuple(replace(same[0], seconds=statistics.median(one.seconds for one in same)) for same in zip(*turns, strict=True))


def _seconds(call: Callable[[], object], fusor: Fusor) -> float:
    started = time.perf_counter()
    call()
    _synchronize(fusor.decoder.device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_tiers(geometry: KVGeometry, directory: Path, config: LoaderConfig, *, chunk_tokens: int) -> dict[str, TierSpeed]:
    """Measure the tiers "ram" and "nvme" by loading prompts of two chunk sizes, without computing.

    NVMe is read with the page cache dropped, as after a start; a running store reads faster from the cache.

    Args:
        geometry: shape of the model's KV.
        directory: a folder on the disk to measure; files written there are removed.
        config: reads in flight and look-ahead.
        chunk_tokens: the larger chunk size; the smaller is an eighth of it.
    """
    make_folder(directory)
    fits = max(1, MAX_BYTES // (CHUNKS * geometry.layers * geometry.layer_bytes(1)))
    sizes = sorted({max(1, min(chunk_tokens, fits) // 8), min(chunk_tokens, fits)})
    read_s: dict[str, list[float]] = {"ram": [], "nvme": []}
    for tokens in sizes:
        with tempfile.TemporaryDirectory(dir=directory, prefix="tier-speed-") as scratch:
            for tier, took_s in _read_s(geometry, Path(scratch), config, tokens).items():
                read_s[tier].append(took_s)
    read_bytes = [geometry.layer_bytes(tokens) for tokens in sizes]
    return {tier: _speed(read_bytes, seconds) for tier, seconds in read_s.items()}


def _speed(read_bytes: list[int], seconds: list[float]) -> TierSpeed:
    """The line through both sizes; without a constant if that would be negative."""
    small, large, small_s, large_s = read_bytes[0], read_bytes[-1], seconds[0], seconds[-1]
    slope = (large_s - small_s) / max(1, large - small)
    read_s = small_s - slope * small
    if slope <= 0 or read_s <= 0:  # one size, or noise: more bytes were read in less time
        return TierSpeed(read_s=0.0, bytes_per_s=large / large_s)
    return TierSpeed(read_s=read_s, bytes_per_s=1 / slope)


def _read_s(geometry: KVGeometry, scratch: Path, config: LoaderConfig, tokens: int) -> dict[str, float]:
    """Median seconds of one read, by tier."""
    shapes = [(heads, tokens, size) for heads, size in map(geometry.heads, range(geometry.layers))]
    drawn = {shape_HTD: torch.randn(shape_HTD).to(geometry.dtype) for shape_HTD in shapes}
    layers = [(drawn[shape_HTD], drawn[shape_HTD].clone()) for shape_HTD in shapes]  # of all chunks
    ids = [[number] * tokens for number in range(CHUNKS)]
    keys = [ChunkKey.of(chunk, model=MODEL) for chunk in ids]
    seconds: dict[str, list[float]] = {"ram": [], "nvme": []}
    with KVStore(StoreConfig(directory=scratch / "kv", ram_budget_bytes=2 * MAX_BYTES)) as store:
        for key, chunk in zip(keys, ids, strict=True):
            store.put(key, ChunkKV(layers, chunk, (), MODEL))
        for _ in range(REPEATS + 1):
            seconds["ram"].append(_load_s(store, keys, geometry, config))
    for _ in range(REPEATS + 1):
        drop_page_cache(path for path in (scratch / "kv").rglob("*") if path.is_file())
        with KVStore(StoreConfig(directory=scratch / "kv", ram_budget_bytes=1)) as store:
            seconds["nvme"].append(_load_s(store, keys, geometry, config))
    reads = CHUNKS * geometry.layers
    return {tier: statistics.median(took_s[1:]) / reads for tier, took_s in seconds.items()}


def _load_s(store: KVStore, keys: list[ChunkKey], geometry: KVGeometry, config: LoaderConfig) -> float:
    """Seconds to load every layer of all chunks."""
    with store.pin(keys) as placements, LayerLoader(config) as loader:
        found = [placement for placement in placements if placement is not None]
        if len(found) < len(keys):
            raise StoreError(f"{len(keys) - len(found)} of {len(keys)} entries that were written are not there")
        prompt = Prompt.of([*(Segment(placement.token_ids, placement) for placement in found), Segment([0])])
        started = time.perf_counter()
        loader.start(prompt, geometry, reuse_layer_0=True)
        for layer in range(geometry.layers):
            loader.synchronize(layer)
        _synchronize(geometry.device)
        return time.perf_counter() - started


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Drop files from the system's page cache; macOS cannot, and this does nothing there."""
    for path in paths if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
