"""Distance of reused KV from full recompute's, token by token (paper figures 7 and 8).

Shapes: R reusable tokens, L layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from cacheblend.base.extras import needs_extra
from cacheblend.blend import FusionConfig, FusionResult, Fusor
from cacheblend.blend.fusion import kv_deviation
from cacheblend.eval.data import Wording
from cacheblend.eval.methods.method import ResidentRequest
from cacheblend.eval.methods.registry import CONTEXTS, make_methods, plan_methods

from .figure_file import new_figure, save_figure

PERCENTS = tuple(range(0, 101, 5))


def token_deviations(fusor: Fusor, resident: ResidentRequest, context: str = CONTEXTS[0]) -> torch.Tensor:
    """KV deviation of full reuse, float32 (L, R), see `kv_deviation`; of a model without sliding windows.

    Args:
        fusor: the model.
        resident: the request.
        context: what its chunks' KV is computed after; one of `CONTEXTS`.
    """
    prompt = resident.prompt
    start, stop = len(prompt.prefix), len(prompt.token_ids) - len(prompt.suffix)
    reused: Any = fusor.fuse(resident.blend_segments(context), FusionConfig(recompute_ratio=0)).cache
    full: Any = fusor.prefill(prompt.token_ids).cache
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
    with needs_extra("eval"):
        from scipy.stats import spearmanr
    return float(spearmanr(one_R.numpy(), other_R.numpy()).statistic)


RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
METHODS = ("blend", "blend_hkvd", "random_tokens")


@torch.no_grad()
def forward_attention(fusor: Fusor, fused: FusionResult, question_tokens: int) -> list[torch.Tensor]:
    """The forward attention matrix of each layer, float32 (Q, S, N): the question's tokens over the whole prompt (§4.1).

    The question runs again over the fused context, so the model must have been loaded with
    `attn_implementation="eager"`, which alone gives attention weights.
    """
    cache = DynamicCache(config=fusor.model.config)
    cache.layers = [copy.copy(layer) for layer in fused.cache.layers]
    cache.crop(-question_tokens)
    tail_1S = torch.tensor([fused.token_ids[-question_tokens:]], device=fused.logits.device)
    output: Any = fusor.model(tail_1S, past_key_values=cache, output_attentions=True)
    return [weights[0].float() for weights in output.attentions]


def attention_deviation(ours: Sequence[torch.Tensor], full: Sequence[torch.Tensor]) -> float:
    """L2 norm of the difference over the L2 norm of full recompute's matrix, in the mean over layers 1 and up."""
    per_layer = [float((mine - own).norm() / own.norm()) for mine, own in zip(ours[1:], full[1:], strict=True)]
    return sum(per_layer) / len(per_layer)


def measure_attention(fusor: Fusor, residents: Sequence[ResidentRequest], wording: Wording) -> list[tuple[str, float, float]]:
    """(method, ratio, attention deviation), the mean over the requests."""
    sums: dict[tuple[str, float], float] = {}
    for resident in residents:
        question = len(resident.prompt.suffix)
        full = forward_attention(fusor, fusor.prefill(resident.prompt.token_ids), question)
        for planned in plan_methods(METHODS, RATIOS):
            fused = make_methods([planned], fusor, wording)[planned.label].answer(resident, 1).fused
            assert fused is not None
            assert planned.ratio is not None
            key = planned.name, planned.ratio
            sums[key] = sums.get(key, 0.0) + attention_deviation(forward_attention(fusor, fused, question), full)
    return [(name, ratio, total / len(residents)) for (name, ratio), total in sums.items()]


def draw_attention_deviation(folder: Path, name: str, measured: Sequence[tuple[str, float, float]]) -> Path:
    """A line a method over the ratio."""
    figure, (axis,) = new_figure()
    for method in METHODS:
        points = [(ratio, deviation) for each, ratio, deviation in measured if each == method]
        axis.plot(*zip(*points, strict=True), marker="o", label=method)
    axis.set_xlabel("recompute ratio")
    axis.set_ylabel("attention deviation")
    axis.legend()
    return save_figure(folder, name, figure, ("method", "ratio", "attention_deviation"), measured)
