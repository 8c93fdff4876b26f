"""Measures what a model costs on its device: full prefills over lengths, layers of blends over ratios (paper §5.1)."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionConfig, Fusor, KVGeometry, LayerKV, Prompt, Segment

from .config import LoaderConfig
from .profile import LayerSample, PrefillSample, Profile, describe_device
from .tier_speed import measure_tiers

LENGTHS = (256, 1024, 4096)
RATIOS = (0.05, 0.15, 0.5, 1.0)
QUESTION_TOKENS = 32
# The first layers of a blend show all that later ones do: layer 0 runs whole, layer 1 projects every row and drops most,
# layer 2 does not check, layer 3 does again.
LAYERS_TIMED = 5
logger = logging.getLogger(__name__)
PATIENCE_S = 2.0

Progress = Callable[[str, int, int], None]
Sample = TypeVar("Sample", PrefillSample, LayerSample)


def measure_profile(
    fusor: Fusor,
    directory: Path,
    config: LoaderConfig,
    *,
    chunk_tokens: int = 512,
    lengths: Sequence[int] = LENGTHS,
    ratios: Sequence[float] = RATIOS,
    repeats: int = 3,
    on_progress: Progress | None = None,
) -> Profile:
    """Measure a model on its device, and the tiers of the disk that a folder is on. Takes seconds to minutes.

    Medians of `repeats` turns after one warm-up, the device synchronised; a turn measures every length and ratio once, so that
    what slows the machine for seconds does not slow all measurements of one length. Lengths beyond the model's positions are
    cut, and none is measured that is longer than one whose full prefill took more than `PATIENCE_S`.

    Args:
        fusor: the model.
        directory: a folder on the disk of the store; what is written there is removed.
        config: reads in flight and look-ahead of the loader.
        chunk_tokens: size of the reads.
        lengths: prompt lengths in tokens.
        ratios: recompute ratios.
        repeats: how often each is measured.
        on_progress: called with "profile", measurements done, and in all.

    Raises:
        ConfigError: no length or ratio, or one outside its range.
    """
    if not lengths or min(lengths) < 1:
        raise ConfigError("lengths", tuple(lengths), "at least one, each of 1 token or more")
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise ConfigError("ratios", tuple(ratios), "at least one, each above 0 and at most 1")
    if repeats < 1:
        raise ConfigError("repeats", repeats, "1 or more")
    report = on_progress or (lambda *_: None)
    most = fusor.max_positions or max(lengths)
    lengths = sorted({min(length, most) for length in lengths})
    prefill: list[list[PrefillSample]] = []  # of each turn
    blend: list[list[LayerSample]] = []
    done = 0
    for turn in range(repeats + 1):  # the first one warms up
        prefill.append([])
        blend.append([])
        for tokens in lengths:
            prefill[turn].append(_prefill(fusor, tokens))
            for ratio in ratios:
                blend[turn] += _blend_layers(fusor, tokens, ratio)
            done += 1
            report("profile", done, (repeats + 1) * len(lengths) + 1)
            if turn == 0 and prefill[turn][-1].seconds > PATIENCE_S:
                break
        if left_out := lengths[len(prefill[0]) :]:
            named = ", ".join(map(str, left_out))
            logger.warning("lengths %s were left out: a prefill of %d tokens took over %g s", named, tokens, PATIENCE_S)
        lengths = lengths[: len(prefill[0])]
    geometry = fusor.decoder.geometry
    profile = Profile(
        model=fusor.fingerprint,
        device=describe_device(geometry.device),
        torch_version=torch.__version__,
        layers=geometry.layers,
        layer_token_bytes=geometry.layer_bytes(1),
        prefill=_medians(prefill[1:]),
        blend=_medians(blend[1:]),
        logits_s=_logits_s(fusor, repeats),
        tiers=measure_tiers(geometry, directory, config, chunk_tokens=chunk_tokens, repeats=repeats),
    )
    report("profile", done + 1, done + 1)
    return profile


@dataclass(frozen=True, slots=True)
class _NoKV:
    """Stands for stored KV where nothing is loaded."""

    token_ids: Sequence[int]
    model: str
    dtype: torch.dtype
    prefix_ids: Sequence[int] = ()


class _OneLayer:
    """A source whose every layer is the same memory on the device, there at once: what is timed is computing alone."""

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """See `LayerSource.start`."""
        self._whole = LayerKV.empty(geometry, len(prompt))
        for x_1HND in (self._whole.k_1HND, self._whole.v_1HND):
            x_1HND.normal_()

    def synchronize(self, layer: int) -> LayerKV:
        """See `LayerSource.synchronize`."""
        return self._whole


def _prefill(fusor: Fusor, tokens: int) -> PrefillSample:
    return PrefillSample(tokens=tokens, seconds=_seconds(lambda: fusor.prefill([0] * tokens), fusor))


def _logits_s(fusor: Fusor, repeats: int) -> float:
    with torch.no_grad():
        hidden_1SM = fusor.decoder.embed(torch.zeros(1, dtype=torch.long, device=fusor.decoder.device))
        return statistics.median([_seconds(lambda: fusor.decoder.logits(hidden_1SM), fusor) for _ in range(repeats + 1)][1:])


def _blend_layers(fusor: Fusor, tokens: int, ratio: float) -> list[LayerSample]:
    """The first layers of a blend."""
    question = max(1, min(QUESTION_TOKENS, tokens // 4))
    stored = [0] * (tokens - question)
    segments = [Segment([0] * question)]
    if stored:
        segments.insert(0, Segment(stored, _NoKV(stored, fusor.fingerprint, fusor.decoder.dtype)))
    samples: list[LayerSample] = []
    before = 0
    with closing(fusor.fuse_steps(segments, FusionConfig(recompute_ratio=ratio, selector="gradual"), _OneLayer())) as steps:
        for layer in range(min(LAYERS_TIMED, fusor.decoder.geometry.layers)):
            started = time.perf_counter()
            rows = next(steps).recomputed
            _synchronize(fusor)
            seconds = time.perf_counter() - started
            projected = before if rows < before else 0
            ran = rows
            if 0 < layer == fusor.decoder.geometry.layers - 1:  # the prompt's last position alone; of the others K and V
                ran, projected = 1, projected or rows
            samples.append(LayerSample(layer=layer, tokens=tokens, rows=ran, projected=projected, seconds=seconds))
            before = rows
    return samples


def _medians(turns: Sequence[Sequence[Sample]]) -> tuple[Sample, ...]:
    """Each sample with the median of its seconds in all turns."""
    return tuple(
        replace(same[0], seconds=statistics.median(sample.seconds for sample in same)) for same in zip(*turns, strict=True)
    )


def _seconds(call: Callable[[], object], fusor: Fusor) -> float:
    started = time.perf_counter()
    call()
    _synchronize(fusor)
    return time.perf_counter() - started


def _synchronize(fusor: Fusor) -> None:
    if fusor.decoder.device.type == "cuda":
        torch.cuda.synchronize(fusor.decoder.device)
