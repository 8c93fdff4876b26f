"""Selectors: which reusable tokens go through each layer. A class each, and a line in `SELECTORS`.

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

# Layers between two filterings. Scoring a layer's candidates costs about 7 % of that layer; on every layer it took back what
# the filtering of twelve layers saved.
FILTER_EVERY = 2
MIN_BUCKETED_ROWS = 64
MAX_MEAN_OFF = 0.01


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

    def counts(self, reusable: int, layers: int, ratio: float, fresh: int | None = None) -> list[int]:
        """Tokens of R reusable ones that the layers 0..L-1 run, `ratio` of R in the mean over layers 1 and up; none at 0.

        With `fresh`, the number of rows that run beside them, the counts make layers' rows such as other prompts have too.
        """
        later = layer_counts(reusable, layers, ratio, self.spread, fresh)
        if ratio == 0:
            return [0, *later]
        if self.first_layer is None:
            return [reusable, *later]
        first = later[0] if later else round(ratio * reusable)
        return [min(self.first_layer * first, reusable), *later]


def layer_counts(reusable: int, layers: int, ratio: float, spread: float, fresh: int | None = None) -> list[int]:
    """How many of R reusable tokens the layers 1..L-1 recompute: falling every second layer, and `ratio` of R in the mean.

    The slope is cut where it would pass 1 (at ratio 1 every layer takes all), which keeps the mean without clamping. Counts
    are rounded so that layers meant to take the same do and none of them is scored; with `fresh` see `bucket_rows`. What is
    rounded away is owed to the next layers; where they cannot make it up, nothing is.
    """
    later = layers - 1
    if later < 1:
        return []
    slope = min(spread, (1 - ratio) / ratio) if ratio > 0 and later > 1 else 0.0
    falling = [1 + slope * (1 - 2 * step / max(later - 1, 1)) for step in range(later)]
    parts = [falling[first : first + FILTER_EVERY] for first in range(0, later, FILTER_EVERY)]
    wanted = [ratio * reusable * sum(part) / len(part) for part in parts]
    exact = [min(round(tokens), reusable) for part, tokens in zip(parts, wanted, strict=True) for _ in part]
    if fresh is None or slope < spread:  # few tokens are left out: what is rounded away could not be made up
        return exact
    bucketed, limit, owed = list[int](), reusable, 0.0
    for part, tokens in zip(parts, wanted, strict=True):
        limit = max(0, min(bucket_rows(round(tokens + owed / len(part)), fresh), limit))
        bucketed += [limit] * len(part)
        owed += len(part) * (tokens - limit)
    return bucketed if abs(sum(bucketed) - sum(exact)) <= MAX_MEAN_OFF * sum(exact) else exact


def bucket_rows(tokens: int, fresh: int) -> int:
    """About `tokens`, so that with the `fresh` rows beside them a layer runs a number of rows that other prompts have too.

    Rows are a multiple of a sixteenth to an eighth of the tokens. The CPU's 16-bit products are compiled for a number of rows
    when they first meet it (oneDNN), 2 to 20 ms and 1 MB for each of a layer's weights: a prompt of 3,105 tokens whose layers
    had other numbers of rows than all before took 0.57 s for 0.38.
    """
    if tokens + fresh < MIN_BUCKETED_ROWS:
        return tokens
    step = 1 << max(0, tokens.bit_length() - 4)
    return max(0, (tokens + fresh + step // 2) // step * step - fresh)


@dataclass(frozen=True, slots=True, eq=False)
class SelectionStep:
    """Question to a selector at one layer.

    Args:
        layer: index of the layer about to run, from 0.
        layers: L.
        reusable: R.
        candidates_C: sorted LongTensor of absolute positions: every reusable one at layer 0, after that those chosen at the
            layer before.
        deviation_C: call it to have fresh K and V of all candidates projected, kept, and compared with the stored ones;
            gives float32 (C,). Not available at layer 0, where nothing has run yet.
        attention_C: float32, the question's attention over the stored KV (`QuestionPass`), summed over this layer and
            those after it; 0 where the selector does not read it.
        offset_C: LongTensor, each candidate's index in its chunk.
        fresh: rows that run beside the candidates.

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
        """The mask that keeps every candidate."""
        return torch.ones(len(self.candidates_C), dtype=torch.bool)

    def none(self) -> torch.Tensor:
        """The mask that keeps no candidate."""
        return torch.zeros(len(self.candidates_C), dtype=torch.bool)

    def top(self, score_C: torch.Tensor, count: int) -> torch.Tensor:
        """The mask that keeps the `count` candidates of highest score."""
        chosen_C = self.none()
        chosen_C[torch.topk(score_C, count).indices.cpu()] = True
        return chosen_C


class Selector(Protocol):
    """Picks the reusable tokens that a layer recomputes, from those that the layer before it did.

    Three attributes are optional. `reads_attention`, where true: the question runs over the stored KV first, which gives
    `SelectionStep.attention_C`. `refreshes_dropped`, where true: K and V of the candidates that a layer leaves out are
    projected there once more. `schedule`: how many tokens the layers run, for the loading controller's predictions.
    """

    def select(self, step: SelectionStep) -> torch.Tensor:
        """A boolean mask (C,) of the candidates that go through this layer's attention and MLP."""


@dataclass(frozen=True, slots=True)
class TopDeviation:
    """HKVD tokens: the candidates of largest KV deviation, as many as the schedule says (paper §4.3, figure 9).

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up. At 0 nothing is recomputed, in layer 0 neither.
        schedule: how many each layer runs.
    """

    ratio: float
    schedule: Schedule

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of largest deviation."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        if keep >= len(step.candidates_C):
            return step.all()
        return step.top(step.deviation_C(), keep) if keep else step.none()


@dataclass(frozen=True, slots=True)
class QuestionAttention:
    """The tokens that the question attends to most over the stored KV (ProphetKV; QCFuse), fewer from layer to layer.

    What a layer's run of a token is worth shows in the layers that read its KV from there on, so each layer goes by the
    attention of itself and those after it.

    Args:
        ratio: share of the reusable tokens, in the mean over layers 1 and up.
    """

    schedule: ClassVar[Schedule] = Schedule(0.9, first_layer=1, asks=True)
    refreshes_dropped: ClassVar[bool] = True
    ratio: float

    @property
    def reads_attention(self) -> bool:
        """Whether there is something to choose."""
        return 0 < self.ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of highest attention."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio, step.fresh)[step.layer]
        is_first = step.layer == 1 and len(step.candidates_C) < step.reusable
        if is_first:
            step.deviation_C()  # measured once, for who looks at it: `FusionResult.deviation`
        return step.all() if keep >= len(step.candidates_C) else step.top(step.attention_C, keep)


class _ChosenOnce(ABC):
    """A choice at layer 0 that all layers keep; layer 1 measures its KV deviation, for those who watch."""

    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer=1)

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of highest score at layer 0, and all of them after that."""
        keep = round(self._ratio * step.reusable)
        if step.layer > 0 or keep >= step.reusable:
            if step.layer == 1 and len(step.candidates_C) < step.reusable:
                step.deviation_C()
            return step.all()
        return step.top(self.score(step), keep) if keep else step.none()

    @abstractmethod
    def score(self, step: SelectionStep) -> torch.Tensor:
        """Float32 (C,); the highest are kept."""


class FirstTokens(_ChosenOnce):
    """The first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""

    def score(self, step: SelectionStep) -> torch.Tensor:
        """Higher towards a chunk's start."""
        return 1 / (1 + step.offset_C)


class RandomTokens(_ChosenOnce):
    """As many tokens at random, the same for the same prompt: the control."""

    def score(self, step: SelectionStep) -> torch.Tensor:
        """A number of each token's own."""
        generator = torch.Generator().manual_seed(len(step.candidates_C))
        return torch.rand(len(step.candidates_C), generator=generator)


class AttentionDeviation:
    """Twice the tokens by the question's attention at layer 0; at layer 1 the half with the largest attention times deviation.

    Args:
        ratio: share of the reusable tokens that layers 1 and up recompute.
    """

    widening: ClassVar[int] = 2
    schedule: ClassVar[Schedule] = Schedule(0.0, first_layer=widening, asks=True)

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.reads_attention = 0 < ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep by attention, then by the product."""
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
        recomputed: per layer the absolute positions to recompute, as in `FusionResult.recomputed`; positions that are not
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


class Oracle(_ChosenOnce):
    """The tokens whose stored KV is farthest from full prefill's, weighed by the question's attention: for analysis.

    Args:
        ratio: share of the reusable tokens.
        error_N: float32 (N,), the score of every position of the prompt, from a full prefill of it.
    """

    def __init__(self, ratio: float, error_N: torch.Tensor) -> None:
        super().__init__(ratio)
        self._error_N = error_N

    def score(self, step: SelectionStep) -> torch.Tensor:
        """The error."""
        return self._error_N[step.candidates_C]


# A selector's name in configurations, and what makes it of a recompute ratio. One of your own is a line here, or an object
# given as `FusionConfig.selector`.
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
            "question_attention": what the question attends to over the stored KV; it won on pretrained models
            (docs/benchmarks.md). "gradual": the paper's HKVD tokens (§4.3, figure 9); "single_shot": the same chosen at layer 1
            for all layers; "attention_deviation": a product of both; "first_tokens": EPIC's; "random": the control.

    Raises:
        ConfigError: a value outside its range, or an unknown selector.

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
        """How many tokens the layers run; that of single-shot selection for a selector that does not say."""
        return getattr(self.resolve_selector(), "schedule", Schedule(0.0))

    @property
    def ratio(self) -> float:
        """The recompute ratio, or else the default."""
        return DEFAULT_RATIO if self.recompute_ratio is None else self.recompute_ratio

    def resolve_selector(self) -> Selector:
        """The selector itself."""
        if self.selector is not None and not isinstance(self.selector, str):
            return self.selector
        return SELECTORS[self.selector or DEFAULT_SELECTOR](self.ratio)
