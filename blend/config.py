"""Options of a fusion: how much is recomputed, and how the tokens are selected."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError

from .schedule import Schedule
from .selection import SELECTORS, Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionConfig:
    """How much of the reusable KV is recomputed, and which tokens of it.

    Args:
        recompute_ratio: share, 0..1, of the reusable tokens that go through attention and MLP, as the mean over layers 1
            and up (paper §4.3). 0 is full KV reuse, 1 is full prefill. The paper's r* is 0.15 (§7, figure 16);
            at 0.14 all that a short prompt's blend computes, the question's pass included, is a fifth of full prefill.
        selector: one of `SELECTORS`, or any `Selector`. "question_attention": what the question attends to over the stored KV;
            it won on pretrained models (docs/benchmarks.md). "gradual": the paper's HKVD tokens (§4.3, figure 9);
            "single_shot": the same chosen at layer 1 for all layers; "attention_deviation": a product of both;
            "first_tokens": EPIC's; "random": the control.
        gradual_spread: how far the first and last ratio of gradual filtering lie from the mean, relative to it, 0..1.

    Raises:
        ConfigError: a value outside its range, or an unknown selector.

    """

    recompute_ratio: float = 0.14
    selector: str | Selector = "question_attention"
    gradual_spread: float = 0.3

    def __post_init__(self) -> None:
        for name in ("recompute_ratio", "gradual_spread"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= 1:
                raise ConfigError(name, value, "a number from 0 to 1")
        if self.selector not in SELECTORS if isinstance(self.selector, str) else not hasattr(self.selector, "select"):
            raise ConfigError("selector", self.selector, f"one of {', '.join(SELECTORS)}, or a Selector")

    @property
    def schedule(self) -> Schedule:
        """How many tokens the layers run, with a selector that is known by name."""
        name = self.selector if isinstance(self.selector, str) else "gradual"
        return SELECTORS[name].schedule(self.gradual_spread)

    def resolve_selector(self) -> Selector:
        """The selector itself."""
        if isinstance(self.selector, str):
            return SELECTORS[self.selector].make(self.recompute_ratio, self.gradual_spread)
        return self.selector
