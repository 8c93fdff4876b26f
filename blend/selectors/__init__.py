"""Selectors: the choice of reusable tokens that go through each layer. A file each, and a line in `SELECTORS`.

`FusionConfig` names one, and the recompute ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option

from .deviation import TopDeviation
from .position import ExplicitPositions, FirstTokens, RandomTokens
from .question_attention import QuestionAttention
from .selector import Schedule, SelectionStep, Selector

__all__ = [
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "ExplicitPositions",
    "FusionConfig",
    "QuestionAttention",
    "Schedule",
    "SelectionStep",
    "Selector",
    "TopDeviation",
]

# A selector's name in configurations, and the function that makes it from a recompute ratio. Add a line for your own, or pass
# an object as `FusionConfig.selector`.
SELECTORS: dict[str, Callable[[float], Selector]] = {
    "question_attention": QuestionAttention,
    "gradual": lambda ratio: TopDeviation(ratio, Schedule(0.3)),
    "single_shot": lambda ratio: TopDeviation(ratio, Schedule(0.0)),
    "first_tokens": FirstTokens,
    "random": RandomTokens,
}
DEFAULT_SELECTOR = "question_attention"
DEFAULT_RATIO = 0.14  # r*; the paper's is 0.15, see `FusionConfig`


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionConfig:
    """Share of the reusable KV that is recomputed, and the choice of its tokens.

    The ratio is a share of the reusable tokens, in the mean over layers 1 and up (paper §4.3): 0 is full KV reuse, 1 is full
    prefill. The paper's r* is 0.15 (§7, figure 16); at 0.14 all that a short prompt's blend computes, the question's pass
    included, is a fifth of full prefill.

    Args:
        recompute_ratio: None for `DEFAULT_RATIO`, or in an engine for the loading controller's choice.
        selector: one of `SELECTORS`, or any `Selector`; None for `DEFAULT_SELECTOR`, or in an engine for the calibrated one.
            "question_attention": tokens of the question's highest attention; it won on pretrained models
            (docs/benchmarks.md). "gradual": the paper's HKVD tokens (§4.3, figure 9); "single_shot": HKVD tokens chosen at
            layer 1 for all layers; "first_tokens": EPIC's; "random": the control.

    Raises:
        ConfigError: a value is outside its range, or the selector is unknown.
    """

    recompute_ratio: float | None = option(
        None,
        "Share of the reusable tokens to recompute, 0 to 1; left out, the preset's, or else the loading controller's choice.",
    )
    selector: str | Selector | None = option(
        None,
        f"How the tokens to recompute are selected; left out, the calibrated selector, or {DEFAULT_SELECTOR}.",
        choices=SELECTORS,
    )

    def __post_init__(self) -> None:
        ratio = self.recompute_ratio
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise ConfigError("recompute_ratio", ratio, "a number from 0 to 1")
        named = isinstance(self.selector, str | None)
        if self.selector not in (None, *SELECTORS) if named else not hasattr(self.selector, "select"):
            raise ConfigError("selector", self.selector, f"one of {', '.join(SELECTORS)}, or a Selector")

    @property
    def schedule(self) -> Schedule:
        """The selector's schedule; that of single-shot selection if it has none."""
        return getattr(self.resolve_selector(), "schedule", Schedule(0.0))

    @property
    def ratio(self) -> float:
        """The recompute ratio; the default if it is None."""
        return DEFAULT_RATIO if self.recompute_ratio is None else self.recompute_ratio

    def resolve_selector(self) -> Selector:
        """The selector itself."""
        if self.selector is not None and not isinstance(self.selector, str):
            return self.selector
        return SELECTORS[self.selector or DEFAULT_SELECTOR](self.ratio)
