"""Positions choose the tokens: the first of every chunk, or given ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cacheblend.base.errors import ConfigError

from .selector import SelectionStep, SingleShotSelector


class FirstTokens(SingleShotSelector):
    """The first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""

    def score(self, step: SelectionStep) -> torch.Tensor:
        return 1 / (1 + step.offset_C)


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
