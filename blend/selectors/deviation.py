"""The deviation of the stored KV from fresh KV chooses the tokens: the paper's HKVD tokens."""

from dataclasses import dataclass

import torch

from .selector import Schedule, SelectionStep


@dataclass(frozen=True, slots=True)
class TopDeviation:
    """HKVD tokens: the candidates of largest KV deviation; the schedule sets their number (paper §4.3, figure 9).

    Keys are compared after their rotation, so that yarn and partial ropes are weighted as attention sees them. At ratio 0
    layer 0 recomputes nothing either.
    """

    ratio: float
    schedule: Schedule

    def select(self, step: SelectionStep) -> torch.Tensor:
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        has_choice = 0 < keep < len(step.candidates_C)
        return step.top(step.deviation_C() if has_choice else step.attention_C, keep)
