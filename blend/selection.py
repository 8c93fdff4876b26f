"""Selectors: the choice of reusable tokens that go through each layer. A class each, and a line in `SELECTORS`.

Shapes: R reusable tokens of the prompt, C candidates of a layer, N tokens of the prompt, L layers of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from cacheblend.base.errors import ConfigError
from cacheblend.base.options import option

# Layers between two filterings: scoring the candidates of every layer costs as much as the filtering saves.
FILTER_EVERY = 2
MIN_BUCKETED_ROWS = 64  # fewer rows are not rounded
MAX_MEAN_OFF = 0.01  # relative error of the mean count that rounding may leave


@dataclass(frozen=True, slots=True)
class Schedule:
    """Counts that fall from layer to layer.

    Args:
        spread: relative distance of the ratios of layer 1 and of the last layer from the mean. 0 is the single-shot
            choice: the tokens of layer 1 serve every layer.
        first_layer: the tokens of layer 0 as a multiple of those of layer 1, which are chosen among them; None for all tokens,
            the paper's choice.
        uses_question_attention: the selector runs the question over the stored KV before the first layer, through all
            layers but the last.

    """

    spread: float
    first_layer: int | None = None
    uses_question_attention: bool = False

    def counts(self, reusable: int, layers: int, ratio: float, fresh: int | None = None) -> list[int]:
        """Number of reusable tokens that each of the layers 0..L-1 runs: `ratio` of R in the mean over layers 1 and up.

        With `fresh`, the number of other rows that run, counts are rounded to numbers of rows that recur (`bucket_rows`).
        """
        later = layer_counts(reusable, layers, ratio, self.spread, fresh)
        if ratio == 0:
            return [0, *later]
        if self.first_layer is None:
            return [reusable, *later]
        first = later[0] if later else round(ratio * reusable)
        return [min(self.first_layer * first, reusable), *later]


def layer_counts(reusable: int, layers: int, ratio: float, spread: float, fresh: int | None = None) -> list[int]:
    """Number of tokens that each of the layers 1..L-1 recomputes: falling every second layer, `ratio` of R in the mean.

    The slope is limited so that no share passes 1, which preserves the mean without clamping. Layers of a pair have equal
    counts, so the second is not scored. With `fresh`, counts are rounded by `bucket_rows`. Rounding errors are carried to later
    layers; if they cannot be compensated, return the unrounded counts.
    """
    later = layers - 1
    if later < 1:
        return []
    slope = min(spread, (1 - ratio) / ratio) if ratio > 0 and later > 1 else 0.0
    falling = [1 + slope * (1 - 2 * step / max(later - 1, 1)) for step in range(later)]
    parts = [falling[first : first + FILTER_EVERY] for first in range(0, later, FILTER_EVERY)]
    wanted = [ratio * reusable * sum(part) / len(part) for part in parts]
    exact = [min(round(tokens), reusable) for part, tokens in zip(parts, wanted, strict=True) for _ in part]
    if fresh is None or slope < spread:  # nearly all tokens run: later layers could not compensate rounding errors
        return exact
    bucketed, limit, owed = list[int](), reusable, 0.0
    for part, tokens in zip(parts, wanted, strict=True):
        limit = max(0, min(bucket_rows(round(tokens + owed / len(part)), fresh), limit))
        bucketed += [limit] * len(part)
        owed += len(part) * (tokens - limit)
    return bucketed if abs(sum(bucketed) - sum(exact)) <= MAX_MEAN_OFF * sum(exact) else exact


def bucket_rows(tokens: int, fresh: int) -> int:
    """Round `tokens` so that a layer's rows, `fresh` ones included, are a number that recurs in other prompts.

    Rows become a multiple of a sixteenth to an eighth of the tokens. oneDNN compiles a 16-bit product for each new number of
    rows, 2 to 20 ms and 1 MB for each weight of a layer (docs/adr/020).
    """
    if tokens + fresh < MIN_BUCKETED_ROWS:
        return tokens
    step = 1 << max(0, tokens.bit_length() - 4)
    return max(0, (tokens + fresh + step // 2) // step * step - fresh)


@dataclass(frozen=True, slots=True, eq=False)
class SelectionStep:
    """Input of a selector at one layer.

    Args:
        layer: index of the layer about to run, from 0.
        layers: L.
        reusable: R.
        candidates_C: sorted LongTensor of absolute positions: every reusable one at layer 0, later those chosen at the
            previous layer.
        deviation_C: function that projects fresh K and V of all candidates, stores them, and compares them with the stored
            ones; returns float32 (C,). Not available at layer 0, where nothing has run yet.
        attention_C: float32, the question's attention over the stored KV (`QuestionPass`), summed over this layer and
            those after it; 0 where the selector does not read it.
        offset_C: LongTensor, each candidate's index in its chunk.
        fresh: number of other rows that run.

    """

    layer: int
    layers: int
    reusable: int
    candidates_C: torch.Tensor
    deviation_C: Callable[[], torch.Tensor]
    attention_C: torch.Tensor
    offset_C: torch.Tensor
    fresh: int = 0

    def all(self) -> torch.Tensor:
        """The mask of every candidate."""
        return torch.ones(len(self.candidates_C), dtype=torch.bool)

    def none(self) -> torch.Tensor:
        """The mask of no candidate."""
        return torch.zeros(len(self.candidates_C), dtype=torch.bool)

    def top(self, score_C: torch.Tensor, count: int) -> torch.Tensor:
        """The mask of the `count` candidates of highest score."""
        chosen_C = self.none()
        chosen_C[torch.topk(score_C, count).indices.cpu()] = True
        return chosen_C


class Selector(Protocol):
    """Picks the reusable tokens that a layer recomputes, among those of the previous layer.

    Three attributes are optional. If `reads_attention` is true, the question runs over the stored KV first and fills
    `SelectionStep.attention_C`. If `refreshes_dropped` is true, K and V of the candidates that a layer drops are projected
    there a last time. `schedule` is the number of tokens of each layer, for the loading controller's predictions.
    """

    def select(self, step: SelectionStep) -> torch.Tensor:
        """A boolean mask (C,) of the candidates that go through this layer's attention and MLP."""


@dataclass(frozen=True, slots=True)
class TopDeviation:
    """HKVD tokens: the candidates of largest KV deviation; the schedule sets their number (paper §4.3, figure 9).

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up. At 0 layer 0 recomputes nothing either.
        schedule: number of tokens of each layer.
    """

    ratio: float
    schedule: Schedule

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose the candidates of largest deviation."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        if keep >= len(step.candidates_C):
            return step.all()
        return step.top(step.deviation_C(), keep) if keep else step.none()


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """The tokens of the question's highest attention over the stored KV (ProphetKV; QCFuse), fewer from layer to layer.

    Recomputing a token in a layer changes its KV in this layer and in later ones. So each layer scores tokens by its own
    attention and that of later layers.

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up.
    """

    schedule: ClassVar[Schedule] = Schedule(0.9, first_layer=1, uses_question_attention=True)
    refreshes_dropped: ClassVar[bool] = True
    ratio: float

    @property
    def reads_attention(self) -> bool:
        """Whether tokens must be chosen: at ratios 0 and 1 none are."""
        return 0 < self.ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose the candidates of highest attention."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        is_first = step.layer == 1 and len(step.candidates_C) < step.reusable
        if is_first:
            step.deviation_C()  # measured once, for `FusionResult.deviation`
        return step.all() if keep >= len(step.candidates_C) else step.top(step.attention_C, keep)


class SingleShotSelector(ABC):
    """A choice at layer 0 for all layers; layer 1 measures its KV deviation, for `FusionResult.deviation`."""

    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer=1)

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose the candidates of highest score at layer 0, and all of them later."""
        keep = round(self._ratio * step.reusable)
        if step.layer > 0 or keep >= step.reusable:
            if step.layer == 1 and len(step.candidates_C) < step.reusable:
                step.deviation_C()
            return step.all()
        return step.top(self.score(step), keep) if keep else step.none()

    @abstractmethod
    def score(self, step: SelectionStep) -> torch.Tensor:
        """Float32 scores (C,); the highest are chosen."""


class FirstTokens(SingleShotSelector):
    """The first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""

    def score(self, step: SelectionStep) -> torch.Tensor:
        """Higher towards a chunk's start."""
        return 1 / (1 + step.offset_C)


class RandomTokens(SingleShotSelector):
    """Random tokens, seeded by the number of candidates, so that a prompt's choice repeats: the control."""

    def score(self, step: SelectionStep) -> torch.Tensor:
        """A random number a token."""
        generator = torch.Generator().manual_seed(len(step.candidates_C))
        return torch.rand(len(step.candidates_C), generator=generator)


class AttentionDeviation:
    """Twice the tokens by the question's attention at layer 0; at layer 1 the half with the largest attention times deviation.

    Args:
        ratio: share of the reusable tokens that layers 1 and up recompute.
    """

    widening: ClassVar[int] = 2
    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer=widening, uses_question_attention=True)

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.reads_attention = 0 < ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose by attention at layer 0, then by the product."""
        keep = min(round(self._ratio * step.reusable) * (self.widening if step.layer == 0 else 1), len(step.candidates_C))
        if keep == len(step.candidates_C):
            return step.all()
        if not keep:
            return step.none()
        if step.layer == 0:
            return step.top(step.attention_C, keep)
        return step.top(step.attention_C * step.deviation_C().cpu(), keep)


class ExplicitPositions:
    """Recomputes given positions: replays a recorded plan, or serves a test.

    Args:
        recomputed: absolute positions to recompute at each layer, as in `FusionResult.recomputed`; positions that are not
            reusable are ignored, since they run anyway.

    """

    def __init__(self, recomputed: Sequence[Sequence[int] | torch.Tensor]) -> None:
        self._positions = [torch.as_tensor(positions, dtype=torch.long) for positions in recomputed]

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Choose the candidates that are listed for this layer."""
        if len(self._positions) != step.layers:
            raise ConfigError("selector", f"{len(self._positions)} lists of positions", f"one for each of {step.layers} layers")
        chosen_C = torch.isin(step.candidates_C, self._positions[step.layer])
        if step.layer > 0 and not chosen_C.all():
            step.deviation_C()
        return chosen_C


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


DEFAULT_RATIO = 0.14  # r*
DEFAULT_SELECTOR = "question_attention"


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
            layer 1 for all layers; "attention_deviation": a product of both; "first_tokens": EPIC's; "random": the control.

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
