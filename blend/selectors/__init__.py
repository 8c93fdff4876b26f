"""Selectors: the choice of reusable tokens that go through each layer. A file each, and a line in `SELECTORS`."""

from __future__ import annotations

from collections.abc import Callable

from .attention_deviation import AttentionDeviation
from .deviation import TopDeviation
from .position import ExplicitPositions, FirstTokens, RandomTokens
from .question_attention import QuestionAttention
from .selector import Schedule, SelectionStep, Selector, SingleShotSelector

__all__ = [
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "AttentionDeviation",
    "ExplicitPositions",
    "FirstTokens",
    "QuestionAttention",
    "RandomTokens",
    "Schedule",
    "SelectionStep",
    "Selector",
    "SingleShotSelector",
    "TopDeviation",
]

# A selector's name in configurations, and the function that makes it from a recompute ratio. Add a line for your own, or pass
# an object as `FusionConfig.selector`.
SELECTORS: dict[str, Callable[[float], Selector]] = {
    "question_attention": QuestionAttention,
    "attention_deviation": AttentionDeviation,
    "gradual": lambda ratio: TopDeviation(ratio, Schedule(0.3)),
    "single_shot": lambda ratio: TopDeviation(ratio, Schedule(0.0)),
    "first_tokens": FirstTokens,
    "random": RandomTokens,
}

DEFAULT_SELECTOR = "question_attention"
