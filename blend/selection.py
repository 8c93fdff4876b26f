"""Selectors: which reusable tokens go through each layer. A class each, and a line in `SELECTORS`.

Shapes: R reusable tokens of the prompt, C candidates of a layer, N tokens of the prompt, L layers of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from cacheblend.base.errors import ConfigError

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
        attention_C: float32, what the question attends to over the stored KV, see `question_pass`, summed over this layer and
            those after it; 0 where the selector does not read it.
        offset_C: LongTensor, each candidate's index in its chunk.

    """

    layer: int
    layers: int
    reusable: int
    candidates_C: torch.Tensor
    deviation_C: Callable[[], torch.Tensor]
    attention_C: torch.Tensor
    offset_C: torch.Tensor

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

    A selector with an attribute `reads_attention` that is true is given `SelectionStep.attention_C`, for which the question
    runs over the stored KV first.
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
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio)[step.layer]
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
    ratio: float

    @property
    def reads_attention(self) -> bool:
        """Whether there is something to choose."""
        return 0 < self.ratio < 1

    def select(self, step: SelectionStep) -> torch.Tensor:
        """Keep the candidates of highest attention."""
        keep = self.schedule.counts(step.reusable, step.layers, self.ratio)[step.layer]
        is_first = step.layer == 1 and len(step.candidates_C) < step.reusable
        if step.layer > 0 and (is_first or keep < len(step.candidates_C)):
            step.deviation_C()  # those that are left out have fresh K and V here once more
        return step.all() if keep >= len(step.candidates_C) else step.top(step.attention_C, keep)


class _ChosenOnce(ABC):
    """A choice at layer 0 that all layers keep; layer 1 measures its KV deviation, for those who watch."""

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


ONCE = Schedule(0.0, first_layer=1)


@dataclass(frozen=True, slots=True)
class NamedSelector:
    """A selector by the name that configurations use.

    Args:
        make: the selector of a ratio and a spread.
        schedule: of a spread; what the loading controller predicts with.
    """

    make: Callable[[float, float], Selector]
    schedule: Callable[[float], Schedule]


def _by_deviation(schedule: Callable[[float], Schedule]) -> NamedSelector:
    return NamedSelector(lambda ratio, spread: TopDeviation(ratio, schedule(spread)), schedule)


def _chosen_once(make: Callable[[float], Selector], schedule: Schedule = ONCE) -> NamedSelector:
    return NamedSelector(lambda ratio, _: make(ratio), lambda _: schedule)


SELECTORS: Mapping[str, NamedSelector] = {
    "question_attention": NamedSelector(lambda ratio, _: QuestionAttention(ratio), lambda _: QuestionAttention.schedule),
    "attention_deviation": _chosen_once(AttentionDeviation, Schedule(0.0, first_layer=AttentionDeviation.widening, asks=True)),
    "gradual": _by_deviation(Schedule),
    "single_shot": _by_deviation(lambda _: Schedule(0.0)),
    "first_tokens": _chosen_once(FirstTokens),
    "random": _chosen_once(RandomTokens),
}
