"""Which reusable tokens go through each layer: the HKVD tokens (paper §4.3).

Shapes: R reusable tokens of the prompt, C candidates of a layer, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheblend.store.errors import ConfigError

from .schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class SelectionStep:
    """What a selector is asked at one layer.

    Args:
        layer: index of the layer about to run, from 0.
        layers: L.
        reusable: R.
        candidates_C: sorted LongTensor of absolute positions: every reusable one at layer 0, after that those chosen at the
            layer before.
        deviation_C: call it to have fresh K and V of all candidates projected, kept, and compared with the stored ones;
            gives float32 (C,). Not available at layer 0, where nothing has run yet.
        context_C: float32, what each candidate's own document does to it, known beforehand (`DocumentContext`); 0 where it is
            not known or does not apply.
        offset_C: LongTensor, each candidate's index in its chunk.

    """

    layer: int
    layers: int
    reusable: int
    candidates_C: torch.Tensor
    deviation_C: Callable[[], torch.Tensor]
    context_C: torch.Tensor
    offset_C: torch.Tensor

    def all(self) -> torch.Tensor:
        """The mask that keeps every candidate."""
        return torch.ones(len(self.candidates_C), dtype=torch.bool)

    def none(self) -> torch.Tensor:
        """The mask that keeps no candidate."""
        return torch.zeros(len(self.candidates_C), dtype=torch.bool)


class Selector(Protocol):
    """Picks the reusable tokens that a layer recomputes, from those that the layer before it did."""

    def select(self, step: SelectionStep) -> torch.Tensor:
        """A boolean mask (C,) of the candidates that go through this layer's attention and MLP."""


@dataclass(frozen=True, slots=True)
class TopDeviation:
    """Keeps the candidates that deviate most, as many as the schedule says (paper §4.3, figure 9).

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up. At 0 nothing is recomputed, in layer 0 neither.
        schedule: how many each layer runs.
        context_weight: weight of the document's deviation beside the one measured here, each relative to its mean over the
            candidates. 0 is the paper's choice.

    """

    ratio: float
    schedule: Schedule
    context_weight: float = 0.0

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of largest deviation."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio)[step.layer]
        if keep >= len(step.candidates_C):
            return step.all()
        chosen_C = step.none()
        if keep:
            score_C = self._known_before(step) if step.layer == 0 else self._score(step)
            chosen_C[torch.topk(score_C, keep).indices.cpu()] = True
        return chosen_C

    def _known_before(self, step: SelectionStep) -> torch.Tensor:
        """What there is to choose by before any layer has run, (C,): what the document does to a token, and behind all of
        those the chunks' first tokens, which took the chunk's start for the text's (EPIC, arXiv 2410.15332).
        """
        first_C = 1 / (1 + step.offset_C)
        return torch.where(step.context_C > 0, 1 + step.context_C, first_C) if self.context_weight else first_C

    def _score(self, step: SelectionStep) -> torch.Tensor:
        deviation_C = step.deviation_C()
        if not self.context_weight or not step.context_C.any():
            return deviation_C
        mean = deviation_C[deviation_C.isfinite()].mean().clamp_min(torch.finfo(torch.float32).tiny)
        context_C = step.context_C.to(deviation_C.device)
        return deviation_C / mean + self.context_weight * context_C / context_C.mean()


class ExplicitPositions:
    """Recomputes given positions: replays a recorded plan, or serves a test.

    Args:
        recomputed: per layer the absolute positions to recompute, as in `FusedPrompt.recomputed`; positions that are not
            reusable are ignored, since they run anyway.

    """

    def __init__(self, recomputed: Sequence[Sequence[int] | torch.Tensor]) -> None:
        self._positions = [torch.as_tensor(positions, dtype=torch.long) for positions in recomputed]

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates that are listed for this layer."""
        if len(self._positions) != step.layers:
            raise ConfigError("selector", f"{len(self._positions)} lists of positions", f"one for each of {step.layers} layers")
        chosen_C = torch.isin(step.candidates_C, self._positions[step.layer])
        if step.layer > 0 and not chosen_C.all():
            step.deviation_C()
        return chosen_C
