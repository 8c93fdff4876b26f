"""How far reused KV is from full recompute's, token by token (paper figures 7 and 8).

Shapes: R reusable tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionConfig, Fusor
from cacheblend.blend.deviation import kv_deviation
from cacheblend.eval.methods import CONTEXTS, ResidentRequest

from .figure_file import new_figure, save_figure

PERCENTS = tuple(range(0, 101, 5))


def token_deviations(fusor: Fusor, resident: ResidentRequest, context: str = CONTEXTS[0]) -> torch.Tensor:
    """KV deviation of full reuse, float32 (L, R), see `kv_deviation`; of a model without sliding windows.

    Args:
        fusor: the model.
        resident: the request.
        context: what its chunks' KV is computed after; one of `CONTEXTS`.
    """
    pieces = resident.pieces
    start, stop = len(pieces.head), len(pieces.token_ids) - len(pieces.tail)
    reused: Any = fusor.fuse(resident.blend_segments(context), FusionConfig(recompute_ratio=0)).cache
    full: Any = fusor.prefill(pieces.token_ids).cache
    return torch.stack(
        [
            kv_deviation(*(x[:, :, start:stop] for x in (own.keys, own.values, mine.keys, mine.values))).cpu()
            for mine, own in zip(reused.layers, full.layers, strict=True)
        ]
    )


def draw_distribution(folder: Path, name: str, deviations: Sequence[torch.Tensor]) -> Path:
    """Figure 7: the share of all deviation that the most deviating tokens make up, at three layers."""
    layers = len(deviations[0])
    shown = sorted({1, layers // 2, layers - 1})
    figure, (axis,) = new_figure()
    rows: list[tuple[object, ...]] = []
    for layer in shown:
        curves = []
        for deviation_LR in deviations:
            falling_R = np.sort(deviation_LR[layer].numpy())[::-1]
            held = np.concatenate([[0], np.cumsum(falling_R)]) / falling_R.sum()
            curves.append(np.interp(PERCENTS, np.linspace(0, 100, len(held)), held))
        mean = np.mean(curves, axis=0)
        axis.plot(PERCENTS, mean, marker=".", label=f"layer {layer}")
        rows += [(layer, percent, float(share)) for percent, share in zip(PERCENTS, mean, strict=True)]
    axis.set_xlabel("tokens of highest KV deviation (%)")
    axis.set_ylabel("share of the layer's KV deviation")
    axis.legend()
    return save_figure(folder, name, figure, ("layer", "tokens_percent", "share_of_deviation"), rows)


def draw_rank_correlation(folder: Path, name: str, deviations: Sequence[torch.Tensor]) -> Path:
    """Figure 8: Spearman's correlation of the tokens' deviations at a layer and the next, from layer 1 up."""
    layers = len(deviations[0])
    figure, (axis,) = new_figure()
    rows = [
        (layer, layer + 1, float(np.mean([_spearman(each[layer], each[layer + 1]) for each in deviations])))
        for layer in range(1, layers - 1)
    ]
    axis.bar([f"{one}-{other}" for one, other, _ in rows], [correlation for *_, correlation in rows])
    axis.set_ylim(min(0.0, *(correlation for *_, correlation in rows)), 1)
    axis.set_xlabel("layers")
    axis.set_ylabel("rank correlation of KV deviation")
    return save_figure(folder, name, figure, ("layer", "next_layer", "spearman"), rows)


def _spearman(one_R: torch.Tensor, other_R: torch.Tensor) -> float:
    try:
        from scipy.stats import spearmanr
    except ImportError as error:
        raise ConfigError("figures", "png", 'only with the package scipy: pip install "cacheblend[eval]"') from error
    return float(spearmanr(one_R.numpy(), other_R.numpy()).statistic)
