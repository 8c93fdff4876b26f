"""How far the question's attention is from full recompute's, against the ratio (paper figure 6).

Shapes: L layers, Q query heads, S tokens of the question, N tokens of the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend.blend import FusedPrompt, Fusor
from cacheblend.eval.data import Wording
from cacheblend.eval.methods import ResidentRequest, make_methods, plan_methods

from .figure_file import new_figure, save_figure

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
METHODS = ("blend", "blend_hkvd", "random_tokens")


@torch.no_grad()
def forward_attention(fusor: Fusor, fused: FusedPrompt, question_tokens: int) -> list[torch.Tensor]:
    """The forward attention matrix of each layer, float32 (Q, S, N): the question's tokens over the whole prompt (§4.1).

    The question runs once more over the fused context, so the model must have been loaded with
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
        question = len(resident.pieces.tail)
        full = forward_attention(fusor, fusor.prefill(resident.pieces.token_ids), question)
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
