"""What a fusion is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cacheblend.store.errors import ConfigError

from .schedule import Schedule
from .selection import Selector, TopDeviation

SELECTORS = ("gradual", "single_shot")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionConfig:
    """How much of the reusable KV is recomputed, and which tokens of it.

    Args:
        recompute_ratio: share, 0..1, of the reusable tokens that go through attention and MLP, as the mean over layers 1
            and up (paper §4.3). 0 is full KV reuse, 1 is full prefill. 0.15 is the paper's r* (§7, figure 16).
        selector: "gradual" (paper §4.3, figure 9), "single_shot" (the choice at layer 1 kept for all layers), or any
            `Selector`.
        gradual_spread: how far the first and last ratio of gradual filtering lie from the mean, relative to it, 0..1.
        context_weight: weight, 0 or more, of what a chunk's own document is known to do to its tokens beside the deviation
            measured in the prompt (`Fusor.precompute_document`). 0 is the paper's choice.
        candidate_ratio: share, 0..1, of the reusable tokens that run through layer 0, to be chosen from at layer 1; 1 is the
            paper's choice. Below 1 they are chosen by what is known before any layer has run (the document's context, and
            behind that the chunks' first tokens), and layer 0, the dearest of a blend, costs its share alone.

    Raises:
        ConfigError: a value outside its range, or an unknown selector.

    """

    recompute_ratio: float = 0.15
    selector: str | Selector = "gradual"
    gradual_spread: float = 0.3
    context_weight: float = 4.0
    candidate_ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("recompute_ratio", "gradual_spread", "candidate_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
                raise ConfigError(name, value, "a number from 0 to 1")
        if isinstance(self.context_weight, bool) or not math.isfinite(self.context_weight) or self.context_weight < 0:
            raise ConfigError("context_weight", self.context_weight, "a number, 0 or more")
        if self.selector not in SELECTORS if isinstance(self.selector, str) else not hasattr(self.selector, "select"):
            raise ConfigError("selector", self.selector, f"one of {', '.join(SELECTORS)}, or a Selector")

    @property
    def schedule(self) -> Schedule:
        """How many tokens the layers run, with a selector that is known by name."""
        return Schedule(0.0 if self.selector == "single_shot" else self.gradual_spread, self.candidate_ratio)

    def resolve_selector(self) -> Selector:
        """The selector itself."""
        if isinstance(self.selector, str):
            return TopDeviation(self.recompute_ratio, self.schedule, self.context_weight)
        return self.selector
