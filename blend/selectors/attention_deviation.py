"""The product of the question's attention and the KV deviation chooses the tokens."""

from __future__ import annotations

from typing import ClassVar

import torch

from .selector import Schedule, SelectionStep


class AttentionDeviation:
    """Twice the tokens by the question's attention at layer 0; at layer 1 the half with the largest attention times deviation.

    Args:
        ratio: share of the reusable tokens that layers 1 and up recompute.
    """

    widening: ClassVar[int] = 2
    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer_multiple=widening, uses_question_attention=True)

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.reads_attention = 0 < ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose by attention at layer 0, then by the product."""
        keep = min(round(self._ratio * step.reusable) * (self.widening if step.layer == 0 else 1), len(step.candidates_C))
        if keep == len(step.candidates_C):
            return step.all()
        if not keep:
            return step.none()
        if step.layer == 0:
            return step.top(step.attention_C, keep)
        return step.top(step.attention_C * step.deviation_C().cpu(), keep)
