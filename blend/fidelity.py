"""Nearness of a blended prompt's answer to full prefill's: the measures of the evaluation, of calibration and of the guard.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
