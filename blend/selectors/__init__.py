"""Selectors: the choice of reusable tokens that go through each layer. A file each, and a line in `SELECTORS`."""

from collections.abc import Callable

from .deviation import TopDeviation
from .position import ExplicitPositions, FirstTokens
from .question_attention import QuestionAttention
from .selector import Schedule, SelectionStep, Selector

# A selector's name in configurations, and the function that makes it from a recompute ratio. Add a line for your own, and its
# name in `SELECTOR_NAMES`, or pass an object as `FusionConfig.selector`.
SELECTORS: dict[str, Callable[[float], Selector]] = {
    "question_attention": QuestionAttention,
    "gradual": lambda ratio: TopDeviation(ratio, Schedule(0.3)),
    "single_shot": lambda ratio: TopDeviation(ratio, Schedule(0.0)),
    "first_tokens": FirstTokens,
}
