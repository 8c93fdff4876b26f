"""Measures of nearness to full prefill: KV deviation (paper §4.1), relative KV error, first-token KL, equal greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache


def kv_deviation(
    fresh_k_1HCD: torch.Tensor, fresh_v_1HCD: torch.Tensor, stored_k_1HCD: torch.Tensor, stored_v_1HCD: torch.Tensor
) -> torch.Tensor:
    """Squared difference of keys plus squared difference of values, a token: float32 (C,).

    Keys are compared rotated to the same positions. A rotation keeps distances, so this is the distance before it, times the
    square of the rope's attention scaling where there is one (yarn) and on the rotated part alone where that is a part: the
    difference that attention sees. Summed over KV heads H and head size D in float32.
    """
    k_C = (fresh_k_1HCD.float() - stored_k_1HCD.float()).square().sum(dim=(0, 1, 3))
    return k_C + (fresh_v_1HCD.float() - stored_v_1HCD.float()).square().sum(dim=(0, 1, 3))


def relative_kv_error(cache: DynamicCache, full: DynamicCache) -> float:
    """Squared difference of all keys and values over the squared size of full recompute's: 0 is none left.

    Sums run over layers, heads, tokens and head size, in float32; relative, so that models can be compared. Layers with a
    sliding window are compared within it.
    """
    difference = size = 0.0
    ours: list[Any] = cache.layers
    theirs: list[Any] = full.layers
    for mine, own in zip(ours, theirs, strict=True):
        for x, y in ((mine.keys, own.keys), (mine.values, own.values)):
            # Generation appends to copies of the layers or after them, never to these tensors.
            difference += float((x.float() - y.float()).square().sum())
            size += float(y.float().square().sum())
    return difference / size


def first_token_kl_nats(full_V: torch.Tensor, blended_V: torch.Tensor) -> float:
    """KL(full || blended) of the answer's first token, in nats, from float32 logits (V,); 0 where they are the same."""
    full, blended = (torch.log_softmax(logits_V.double(), dim=-1) for logits_V in (full_V, blended_V))
    # Rounding alone may bring it below 0.
    return max(0.0, float(torch.nn.functional.kl_div(blended, full, reduction="sum", log_target=True)))


def equal_tokens_share(full_ids: Sequence[int], blended_ids: Sequence[int]) -> float:
    """Share of full prefill's greedy tokens that blending gives too, up to the first that differs; 0..1.

    Tokens after the first difference do not count: they follow other texts.

    Args:
        full_ids: at least one; they end with the end of sequence where that came.
        blended_ids: no fewer unless they ended.
    """
    differs = [one != other for one, other in zip(full_ids, blended_ids, strict=False)]
    return (differs.index(True) if True in differs else len(differs)) / len(full_ids)
