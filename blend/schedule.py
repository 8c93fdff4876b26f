"""Counts of the reusable tokens that each layer runs (paper §4.3, figure 9)."""

from __future__ import annotations

from dataclasses import dataclass

# Layers between two filterings. Scoring a layer's candidates costs about 7 % of that layer; on every layer it took back what
# the filtering of twelve layers saved.
FILTER_EVERY = 2


@dataclass(frozen=True, slots=True)
class Schedule:
    """Counts that fall from layer to layer.

    Args:
        spread: how far the ratios of layer 1 and of the last layer lie from the mean, relative to it. 0 is the single-shot
            choice: the tokens of layer 1 serve every layer.
        first_layer: how many times the tokens of layer 1 run through layer 0, to be chosen from there; None for all tokens,
            the paper's choice.
        asks: the question runs over the stored KV before the first layer, through all layers but the last.

    """

    spread: float
    first_layer: int | None = None
    asks: bool = False

    def counts(self, reusable: int, layers: int, ratio: float) -> list[int]:
        """Tokens of R reusable ones that the layers 0..L-1 run, `ratio` of R in the mean over layers 1 and up; none at 0."""
        later = layer_counts(reusable, layers, ratio, self.spread)
        if ratio == 0:
            return [0, *later]
        if self.first_layer is None:
            return [reusable, *later]
        first = later[0] if later else round(ratio * reusable)
        return [min(self.first_layer * first, reusable), *later]


def layer_counts(reusable: int, layers: int, ratio: float, spread: float) -> list[int]:
    """How many of R reusable tokens the layers 1..L-1 recompute: falling every second layer, and `ratio` of R in the mean.

    The slope is cut where it would pass 1 (at ratio 1 every layer takes all), which keeps the mean without clamping. Counts
    are rounded, to half a token a layer, so that layers meant to take the same do and none of them is scored.
    """
    later = layers - 1
    if later < 1:
        return []
    slope = min(spread, (1 - ratio) / ratio) if ratio > 0 and later > 1 else 0.0
    falling = [1 + slope * (1 - 2 * step / max(later - 1, 1)) for step in range(later)]
    shared = [falling[first : first + FILTER_EVERY] for first in range(0, later, FILTER_EVERY)]
    return [min(round(ratio * reusable * sum(part) / len(part)), reusable) for part in shared for _ in part]
