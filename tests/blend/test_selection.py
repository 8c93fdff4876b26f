"""How many tokens each layer recomputes."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompts import BOS, chunk, draw_ids
from tiny_models import tiny_model

from cacheblend.base.errors import ConfigError
from cacheblend.blend import SELECTORS, ExplicitPositions, FusionConfig, Fusor, Prompt, Schedule, Segment, SelectionStep

BAD_RATIOS: list[Any] = [-0.1, 1.1, float("nan"), "0.15", True]


@given(reusable=st.integers(0, 5000), layers=st.integers(1, 80), ratio=st.floats(0, 1), spread=st.floats(0, 1))
def test_counts_fall_and_keep_the_mean(reusable: int, layers: int, ratio: float, spread: float) -> None:
    """Counts never rise from layer to layer, stay within the tokens there are, and their mean is the ratio."""
    counts = Schedule(spread).counts(reusable, layers, ratio)[1:]
    assert len(counts) == layers - 1
    assert all(0 <= later <= earlier <= reusable for earlier, later in pairwise(counts))
    if counts:
        assert abs(sum(counts) / len(counts) - ratio * reusable) <= 0.501


@given(
    reusable=st.integers(0, 5000),
    fresh=st.integers(0, 5000),
    layers=st.integers(1, 80),
    ratio=st.floats(0, 1),
    spread=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_bucketed_counts_keep_the_mean(reusable: int, fresh: int, layers: int, ratio: float, spread: float) -> None:
    """Counts beside any number of fresh rows fall too, and their mean is the ratio to a hundredth of it."""
    counts, exact = (Schedule(spread).counts(reusable, layers, ratio, beside)[1:] for beside in (fresh, None))
    assert all(0 <= later <= earlier <= reusable for earlier, later in pairwise(counts))
    assert abs(sum(counts) - sum(exact)) <= 0.01 * sum(exact)


def test_prompts_of_other_lengths_have_the_same_numbers_of_rows() -> None:
    """The default's layers of any prompt of 2,500 to 3,500 tokens run few numbers of rows together."""
    schedule = FusionConfig().schedule
    lengths = range(2500, 3500, 7)
    bucketed, exact = (
        {
            count + fresh
            for number, reusable in enumerate(lengths)
            for fresh in [20 + number % 40]
            for count in schedule.counts(reusable, 30, 0.14, fresh if is_bucketed else None)
        }
        for is_bucketed in (True, False)
    )
    assert len({rows for rows in bucketed if rows >= 64}) <= 60
    assert len(exact) > 400


@pytest.mark.parametrize(("ratio", "first", "last"), [(0.15, 190, 105), (1.0, 1000, 1000), (0.9, 990, 800), (0.0, 0, 0)])
def test_gradual_ratios_lie_around_the_mean(ratio: float, first: int, last: int) -> None:
    """Ratios fall from 1.3 to 0.7 of the mean, less steeply where they would pass 1."""
    counts = Schedule(0.3).counts(1000, 12, ratio)
    assert (counts[1], counts[-1]) == (first, last)


def step_at(layer: int, candidates: int, reusable: int, **known: torch.Tensor) -> SelectionStep:
    """A step of five layers; what is not given is 0, and the deviation falls from token to token."""
    return SelectionStep(
        layer=layer,
        layers=5,
        reusable=reusable,
        candidates_C=torch.arange(candidates),
        deviation_C=lambda: known.get("deviation", torch.arange(float(candidates), 0, -1)),
        attention_C=known.get("attention", torch.zeros(candidates)),
        bridge_C=known.get("bridge", torch.zeros(candidates, dtype=torch.bool)),
        offset_C=known.get("offset", torch.arange(candidates)),
    )


def test_runs_that_link_chunks() -> None:
    """Three tokens in a row link the chunks that have them, not within one chunk, nor if most chunks have them."""
    fusor, name, title = Fusor(tiny_model("llama")), [11, 12, 13], [21, 22, 23]
    chunks = [[*title, 5, *name, 6], [*title, 7, 31, 32, 33, 31, 32, 33], [*title, *name], [*title, 9, 11, 12]]
    stored = [Segment(ids, fusor.precompute(ids, BOS)) for ids in chunks]
    prompt = Prompt.of([Segment([*BOS, *name]), *stored, Segment([11, 12])])
    assert [prompt.token_ids[place] for place in prompt.bridges_N().nonzero()[:, 0]] == name + name
    assert not Prompt.of([Segment([1]), Segment([2])]).bridges_N().any()
    step = step_at(4, 4, 12, attention=torch.tensor([2.0, 2, 3, 5]), bridge=torch.tensor([False, True, False, False]))
    links = SELECTORS["question_attention"](0.5).select(step)
    assert links.tolist() == [False, True, False, True]


@pytest.mark.parametrize("reusable", [100, 101, 102, 103])
def test_single_shot_never_scores_twice(reusable: int) -> None:
    """The single-shot choice asks for deviations at layer 1 alone, whatever is left over of its share."""
    single = SELECTORS["single_shot"](0.2)
    first = round(0.2 * reusable)
    counts = ((0, reusable), (1, reusable), (2, first), (3, first), (4, first))
    assert [int(single.select(step_at(layer, count, reusable)).sum()) for layer, count in counts] == [reusable, *[first] * 4]


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_keep_their_schedule(name: str) -> None:
    """Every layer keeps what the schedule that the controller counts with says, nothing at ratio 0, all at 1."""
    for ratio in (0.0, 0.2, 1.0):
        selector, count, kept = SELECTORS[name](ratio), 40, []
        for layer in range(5):
            count = int(selector.select(step_at(layer, count, 40)).sum())
            kept.append(count)
        assert kept == FusionConfig(selector=name).schedule.counts(40, 5, ratio)
        assert sum(kept[1:]) == round(ratio * 40) * 4


def test_the_question_s_attention_decides() -> None:
    """The tokens of highest attention are chosen."""
    attention = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0])
    question = SELECTORS["question_attention"](0.2)
    assert question.select(step_at(0, 10, 10, attention=attention)).nonzero()[:, 0].tolist() == [1, 3, 4]
    later = step_at(4, 4, 10, attention=torch.tensor([0.1, 0.5, 0.9, 0.7]))
    assert question.select(later).tolist() == [False, False, True, False]


def test_a_selector_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class and a line: a selector that is registered is known to configurations by its name, and blends."""

    class EveryOther:
        schedule = Schedule(0.0, first_layer_multiple=1)

        def __init__(self, ratio: float) -> None:
            self.ratio = ratio

        def select(self, step: SelectionStep) -> torch.Tensor:
            return step.all() if step.layer else step.offset_C % 2 == 0

    monkeypatch.setitem(SELECTORS, "every_other", EveryOther)
    config = FusionConfig(recompute_ratio=0.5, selector="every_other")
    assert config.schedule is EveryOther.schedule
    fusor = Fusor(tiny_model("llama"))
    segments = [Segment(BOS), chunk(fusor, 10, seed=1), Segment(draw_ids(3, seed=2))]
    assert fusor.fuse(segments, config).recomputed[2].tolist() == [0, 1, 3, 5, 7, 9, 11, 12, 13]


def test_first_tokens_are_those_of_every_chunk() -> None:
    """EPIC's choice goes by the place in the chunk."""
    offset = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    chosen = SELECTORS["first_tokens"](0.4).select(step_at(0, 10, 10, offset=offset))
    assert chosen.nonzero()[:, 0].tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda ratio=ratio: FusionConfig(recompute_ratio=ratio), "recompute_ratio=.*0 to 1") for ratio in BAD_RATIOS),
        (lambda: FusionConfig(selector="best"), "question_attention, gradual"),
        (lambda: ExplicitPositions([[0, 1], [0]]).select(step_at(0, 2, 2)), "5 layers"),
    ],
)
def test_bad_settings(make: Callable[[], object], message: str) -> None:
    """A ratio that is not a number from 0 to 1, an unknown selector and a plan of another depth are refused by name."""
    with pytest.raises(ConfigError, match=message):
        make()
