"""The paper's two estimators: how long a layer's KV takes to load, and how long its recompute takes (§5.1)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from cacheblend.blend import LayerKV
from cacheblend.blend.attention import Rows
from cacheblend.blend.decoder import Decoder

from .config import LoaderConfig


class LoadEstimator:
    """T_load(layer) = bytes / throughput of the tier, summed over tiers (paper footnote 6).

    Throughputs are the configured ones: did they follow each request's luck, equal requests would get different ratios.
    """

    def __init__(self, config: LoaderConfig) -> None:
        self._bytes_per_s = {"ram": config.ram_bytes_per_s, "nvme": config.nvme_bytes_per_s}

    def layer_s(self, layer_bytes: Mapping[str, int]) -> float:
        """Seconds to load one layer, given its bytes by tier."""
        return sum(count / self._bytes_per_s[tier] for tier, count in layer_bytes.items())


class RecomputeEstimator:
    """T_recompute(r, layer) = share of the rows that run x the layer's prefill (paper footnote 5).

    Args:
        prefill_layer_s: measured (tokens, seconds) of one layer's full prefill, of at least one length. Between and beyond the
            measured lengths the seconds follow a * tokens + b * tokens^2, linear work and attention, through the shortest
            and the longest; a and b are not negative, for which the shortest gives way.
    """

    def __init__(self, prefill_layer_s: Sequence[tuple[int, float]]) -> None:
        (short, short_s), (long, long_s) = min(prefill_layer_s), max(prefill_layer_s)
        quadratic = 0.0 if short == long else (long_s / long - short_s / short) / (long - short)
        self._quadratic = min(max(0.0, quadratic), long_s / long**2)
        self._linear = max(0.0, long_s / long - self._quadratic * long)

    def prefill_layer_s(self, tokens: int) -> float:
        """Seconds of one layer's full prefill."""
        return self._linear * tokens + self._quadratic * tokens * tokens

    def layer_s(self, ratio: float, reusable: int, fresh: int) -> float:
        """Seconds of one layer with `ratio` of the reusable tokens and all fresh ones recomputed."""
        tokens = reusable + fresh
        return (ratio * reusable + fresh) / tokens * self.prefill_layer_s(tokens)


def measure_prefill(decoder: Decoder, lengths: Sequence[int] = (256, 1024), repeats: int = 3) -> list[tuple[int, float]]:
    """Median seconds of one layer's prefill at some lengths, on random hidden states, device synchronised."""
    layer = min(1, decoder.geometry.layers - 1)
    measured = []
    with torch.no_grad():
        for tokens in lengths:
            positions = torch.arange(tokens)
            rows = Rows.of(positions, decoder.device)
            hidden = decoder.embed(torch.zeros(tokens, dtype=torch.long, device=decoder.device))
            cos_sin = decoder.rotary(rows.on_device_S, hidden)[decoder.layer_types[layer]]
            seconds = []
            for _ in range(repeats + 1):
                started = time.perf_counter()
                decoder.run_rows(layer, hidden, rows, cos_sin, LayerKV.empty(decoder.geometry, tokens), scatter=True)
                if decoder.device.type == "cuda":
                    torch.cuda.synchronize(decoder.device)
                seconds.append(time.perf_counter() - started)
            measured.append((tokens, statistics.median(seconds[1:])))
    return measured
