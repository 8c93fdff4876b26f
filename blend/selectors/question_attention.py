"""The question's attention over the stored KV chooses the tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .selector import Schedule, SelectionStep

BRIDGE_WEIGHT = 2  # of a token that links chunks (docs/adr/007)


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """The tokens of the question's highest attention over the stored KV (ProphetKV; QCFuse), fewer from layer to layer.

    Tokens that link chunks count twice: over them the first hop of a question leads to the second, and a chunk's stored
    KV knows no other chunk. Recomputing a token in a layer changes its KV in this layer and in later ones. So each layer scores
    tokens by its own attention and that of later layers.
    """

    schedule: ClassVar[Schedule] = Schedule(0.9, first_layer_multiple=1, uses_question_attention=True)
    refreshes_dropped: ClassVar[bool] = True
    ratio: float

    @property
    def reads_attention(self) -> bool:
        """Whether tokens must be chosen: at ratios 0 and 1 none are."""
        return 0 < self.ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        if step.layer == 1 and len(step.candidates_C) < step.reusable:
            step.deviation_C()  # measured once, for `FusionResult.deviation`
        return step.top(step.attention_C * (1 + (BRIDGE_WEIGHT - 1) * step.bridge_C), keep)
