"""Which reusable tokens go through each layer: the HKVD tokens (paper §4.3).

Shapes: R reusable tokens of the prompt, C candidates of a layer, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheblend.store.errors import ConfigError

# Layers between two filterings. Scoring a layer's candidates costs about 7 % of that layer; on every layer it took back what
# the filtering of twelve layers saved.
FILTER_EVERY = 2


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

    """

    layer: int
    layers: int
    reusable: int
    candidates_C: torch.Tensor
    deviation_C: Callable[[], torch.Tensor]
    context_C: torch.Tensor

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
    """Runs layer 0 whole, then keeps the candidates that deviate most: as many as `layer_counts` says (paper §4.3, figure 9).

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up. At 0 nothing is recomputed, in layer 0 neither.
        spread: how far the first and the last layer's ratio lie from the mean, relative to it. 0 is the single-shot choice:
            the tokens of layer 1 serve every layer.
        context_weight: weight of the document's deviation beside the one measured here, each relative to its mean over the
            candidates. 0 is the paper's choice.

    """

    ratio: float
    spread: float
    context_weight: float = 0.0

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of largest deviation."""
        if self.ratio == 0:
            return step.none()
        if step.layer == 0:
            return step.all()
        keep = layer_counts(step.reusable, step.layers, self.ratio, self.spread)[step.layer - 1]
        if keep >= len(step.candidates_C):
            return step.all()
        chosen_C = step.none()
        chosen_C[torch.topk(self._score(step), keep).indices.cpu()] = True
        return chosen_C

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


SELECTORS: dict[str, Callable[[float, float, float], Selector]] = {
    "gradual": TopDeviation,
    "single_shot": lambda ratio, _spread, context_weight: TopDeviation(ratio, 0.0, context_weight),
}


def layer_counts(reusable: int, layers: int, ratio: float, spread: float) -> list[int]:
    """How many of R reusable tokens the layers 1..L-1 recompute: falling every second layer, and `ratio` of R in the mean.

    The slope is cut where it would pass 1 (at ratio 1 every layer takes all), which keeps the mean without clamping. Counts
    are rounded down, and what is missing to the exact sum goes to the first layers that are not full, so they never rise.
    """
    later = layers - 1
    if later < 1:
        return []
    slope = min(spread, (1 - ratio) / ratio) if ratio > 0 and later > 1 else 0.0
    falling = [1 + slope * (1 - 2 * step / max(later - 1, 1)) for step in range(later)]
    shared = [falling[first : first + FILTER_EVERY] for first in range(0, later, FILTER_EVERY)]
    exact = [ratio * reusable * sum(part) / len(part) for part in shared for _ in part]
    counts = [min(int(count + 1e-6), reusable) for count in exact]
    full = counts.count(reusable)  # these stand first and cannot take more
    missing = round(sum(exact)) - sum(counts)
    return [count + (full <= step < full + missing) for step, count in enumerate(counts)]
