"""Positions choose the tokens: the first of every chunk, or given ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from cacheblend.base.errors import ConfigError

from .selector import Schedule, SelectionStep


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332), chosen at layer 0 for all layers.

    Layer 1 measures its KV deviation, for `FusionResult.deviation`.
    """

    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer_multiple=1)
    ratio: float

    def select(self, step: SelectionStep) -> torch.Tensor:
        if step.layer == 0:
            return step.top(1 / (1 + step.offset_C), round(self.ratio * step.reusable))
        if step.layer == 1 and len(step.candidates_C) < step.reusable:
            step.deviation_C()
        return step.all()


class ExplicitPositions:
    """Recomputes given positions: replays a recorded plan, or serves a test.

    Args:
        recomputed: absolute positions to recompute at each layer, as in `FusionResult.recomputed`; positions that are not
            reusable are ignored, since they run anyway.
    """

    def __init__(self, recomputed: Sequence[Sequence[int] | torch.Tensor]) -> None:
        self._positions = [torch.as_tensor(positions, dtype=torch.long) for positions in recomputed]

    def select(self, step: SelectionStep) -> torch.Tensor:
        if len(self._positions) != step.layers:
            raise ConfigError("selector", f"{len(self._positions)} lists of positions", f"one for each of {step.layers} layers")
        chosen_C = torch.isin(step.candidates_C, self._positions[step.layer])
        if step.layer > 0 and not chosen_C.all():
            step.deviation_C()
        return chosen_C
