"""How many tokens each layer recomputes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.blend import ExplicitPositions, FusionConfig, Schedule, SelectionStep, TopDeviation
from cacheblend.blend.schedule import layer_counts
from cacheblend.store.errors import ConfigError


@given(reusable=st.integers(0, 5000), layers=st.integers(1, 80), ratio=st.floats(0, 1), spread=st.floats(0, 1))
def test_counts_fall_and_keep_the_mean(reusable: int, layers: int, ratio: float, spread: float) -> None:
    """Counts never rise from layer to layer, stay within the tokens there are, and their mean is the ratio."""
    counts = layer_counts(reusable, layers, ratio, spread)
    assert len(counts) == layers - 1
    assert all(0 <= later <= earlier <= reusable for earlier, later in pairwise(counts))
    if counts:
        assert abs(sum(counts) / len(counts) - ratio * reusable) <= 0.501


@pytest.mark.parametrize(("ratio", "first", "last"), [(0.15, 190, 105), (1.0, 1000, 1000), (0.9, 990, 800), (0.0, 0, 0)])
def test_gradual_ratios_lie_around_the_mean(ratio: float, first: int, last: int) -> None:
    """Ratios fall from 1.3 to 0.7 of the mean, less steeply where they would pass 1."""
    counts = layer_counts(1000, 12, ratio, 0.3)
    assert (counts[0], counts[-1]) == (first, last)


@pytest.mark.parametrize("reusable", [100, 101, 102, 103])
def test_single_shot_never_scores_twice(reusable: int) -> None:
    """The single-shot choice asks for deviations at layer 1 alone, whatever is left over of its share."""
    asked: list[int] = []

    def step(layer: int, candidates: int) -> SelectionStep:
        def deviation() -> torch.Tensor:
            asked.append(layer)
            return torch.arange(float(candidates))

        return SelectionStep(
            layer, 5, reusable, torch.arange(candidates), deviation, torch.zeros(candidates), torch.arange(candidates)
        )

    single = TopDeviation(0.2, Schedule(0.0))
    first = round(0.2 * reusable)
    kept = [
        int(single.select(step(layer, count)).sum())
        for layer, count in ((0, reusable), (1, reusable), (2, first), (3, first), (4, first))
    ]
    assert kept == [reusable, *[first] * 4]
    assert asked == [1]


def test_candidates_are_chosen_by_what_is_known_before() -> None:
    """Layer 0 runs the tokens whose document says they need it, then the chunks' first ones; never fewer than layer 1."""
    context = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.2, 0.9, 0.0, 0.0])
    offset = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])

    def at_layer_0(ratio: float, candidate_ratio: float, weight: float = 4.0) -> list[int]:
        step = SelectionStep(0, 3, 10, torch.arange(10), lambda: torch.zeros(10), context, offset)
        return TopDeviation(ratio, Schedule(0.0, candidate_ratio), weight).select(step).nonzero()[:, 0].tolist()

    assert at_layer_0(0.1, 0.2) == [4, 7]
    assert at_layer_0(0.2, 0.5) == [0, 4, 6, 7, 8]
    assert at_layer_0(0.3, 0.0) == [4, 6, 7]
    assert at_layer_0(0.3, 1.0) == list(range(10))
    assert at_layer_0(1.0, 0.2) == list(range(10))
    assert at_layer_0(0.0, 1.0) == []
    assert at_layer_0(0.1, 0.3, weight=0.0) == [0, 4, 8]


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), "0.15", True])
def test_ratio_outside_0_to_1_is_refused(ratio: object) -> None:
    """A ratio that is not a number from 0 to 1 names itself in the error."""
    with pytest.raises(ConfigError, match=r"recompute_ratio=.*0 to 1"):
        FusionConfig(recompute_ratio=ratio)


def test_candidate_ratio_outside_0_to_1_is_refused() -> None:
    """So does the candidates' share."""
    with pytest.raises(ConfigError, match=r"candidate_ratio=2.*0 to 1"):
        FusionConfig(candidate_ratio=2)


@pytest.mark.parametrize("weight", [-1.0, float("inf"), True])
def test_a_weight_below_0_is_refused(weight: float) -> None:
    """A weight that is no number of 0 or more names itself in the error."""
    with pytest.raises(ConfigError, match=r"context_weight=.*0 or more"):
        FusionConfig(context_weight=weight)


def test_unknown_selector_is_refused() -> None:
    """An unknown selector's error lists the known ones."""
    with pytest.raises(ConfigError, match="gradual, single_shot"):
        FusionConfig(selector="best")


def test_explicit_positions_need_every_layer() -> None:
    """A plan of another depth is refused."""
    plan = ExplicitPositions([[0, 1], [0]])
    with pytest.raises(ConfigError, match="3 layers"):
        plan.select(SelectionStep(0, 3, 2, torch.arange(2), lambda: torch.zeros(2), torch.zeros(2), torch.arange(2)))
