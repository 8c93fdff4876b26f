"""The estimators give the profile's measurements back, and go on sensibly between and beyond them."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import linear_profile

from cacheblend.blend import Schedule
from cacheblend.blend.selectors import QuestionAttention
from cacheblend.loader.estimators import Pipeline, RecomputeEstimator, WorkEstimator, fit, load_seconds
from cacheblend.loader.profile import LayerSample, PrefillSample, TierSpeed

coefficient = st.floats(0, 1e-3)


def test_load_adds_up_reads() -> None:
    """A layer's loading is a constant a read and its bytes over the throughput, by tier."""
    slow, fast = TierSpeed(read_s=0.5, bytes_per_s=1e9), TierSpeed(read_s=0, bytes_per_s=4e9)
    tiers = {"nvme": slow, "ram": fast}
    reads = [("nvme", 10**9), ("ram", 10**9), ("nvme", 10**8)]
    assert load_seconds(reads, tiers) == pytest.approx({"nvme": 2.1, "ram": 0.25})
    assert load_seconds([], tiers) == {}


@given(coefficients=st.tuples(coefficient, coefficient, coefficient), tokens=st.integers(1, 20_000))
@settings(deadline=None)
def test_a_quadratic_is_found_again(coefficients: tuple[float, float, float], tokens: int) -> None:
    """Seconds that follow the model's form are given back at every length, measured or not."""

    def seconds(count: int) -> float:
        constant, linear, quadratic = coefficients
        return 1e-6 + constant + linear * count + quadratic * count * count

    lengths = (64, 512, 2048, 4096)
    profile = linear_profile()
    measured = dataclasses.replace(
        profile, prefill=tuple(PrefillSample(tokens=count, seconds=seconds(count)) for count in lengths)
    )
    assert RecomputeEstimator(measured, Schedule(0.3)).prefill_s(tokens) == pytest.approx(seconds(tokens), rel=1e-4)


def test_one_length_is_not_taken_for_any_other() -> None:
    """Of one measured length, other lengths cost in proportion, a full prefill and layer 0 alike; not the same."""
    profile = linear_profile()
    one = dataclasses.replace(
        profile,
        prefill=(PrefillSample(tokens=256, seconds=1.75),),
        blend=tuple(sample for sample in profile.blend if sample.layer or sample.tokens == 100),
    )
    estimator = RecomputeEstimator(one, Schedule(0.3))
    assert estimator.prefill_s(3072) == pytest.approx(12 * 1.75)
    assert estimator.layer_s(1.0, 2000, 0)[0] == pytest.approx(2 * estimator.layer_s(1.0, 1000, 0)[0])


@given(
    measured=st.lists(st.tuples(st.integers(1, 10**4), st.floats(1e-7, 10)), min_size=1, max_size=5, unique_by=lambda m: m[0]),
    tokens=st.integers(0, 10**4),
)
@settings(deadline=None)
def test_noise_never_makes_more_tokens_cheaper(measured: list[tuple[int, float]], tokens: int) -> None:
    """Whatever was measured, seconds are not negative and do not fall with the length."""
    found = fit([[1, count, count * count] for count, _ in measured], [took_s for _, took_s in measured])

    def seconds(count: int) -> float:
        return float(found @ [1, count, count * count])

    assert 0 <= seconds(tokens) <= seconds(tokens + 1) * (1 + 1e-9)


def test_a_slowed_sample_does_not_bend_the_others() -> None:
    """One of twelve that took three times as long leaves the fit where it was, within a few percent."""
    lengths = range(100, 1300, 100)
    seconds = [0.01 + 2e-5 * count for count in lengths]
    seconds[4] *= 3
    found = fit([[1, count, count * count] for count in lengths], seconds)
    for count in lengths:
        assert found @ [1, count, count * count] == pytest.approx(0.01 + 2e-5 * count, rel=0.03)


def test_all_rows_and_scattered_ones_are_told_apart() -> None:
    """Where layers that run every row took half as long a pair of row and key, ratio 1.0 is predicted so, and 0.5 is not."""

    def sample(tokens: int, rows: int) -> LayerSample:
        pair_s = 1e-8 if rows < tokens else 5e-9
        return LayerSample(layer=1, tokens=tokens, rows=rows, projected=0, seconds=1e-3 + 5e-5 * rows + pair_s * rows * tokens)

    sizes = [(tokens, int(tokens * share)) for tokens in (500, 1000, 4000) for share in (0.1, 0.5, 1.0)]
    profile = linear_profile()
    whole = [sample for sample in profile.blend if sample.layer == 0]
    measured = dataclasses.replace(profile, blend=(*whole, *(sample(*size) for size in sizes)), logits_s=0.0)
    estimator = RecomputeEstimator(measured, Schedule(0.0))
    for ratio in (0.5, 1.0):
        assert estimator.layer_s(ratio, 2000, 0)[-2] == pytest.approx(sample(2000, int(2000 * ratio)).seconds, rel=0.02)


def test_nothing_measured_or_nothing_taken() -> None:
    """Without samples, or with samples of no seconds, every coefficient is 0."""
    assert not fit([], []).any()
    assert not fit([[1.0, 2.0, 4.0]], [0.0]).any()


@given(ratio=st.floats(0.01, 1), reusable=st.integers(100, 5000), fresh=st.integers(1, 500))
@settings(deadline=None)
def test_layers_follow_the_schedule(ratio: float, reusable: int, fresh: int) -> None:
    """Layer 0 runs every row; later ones the reusable rows that the schedule keeps, and every fresh one; the last one row."""
    profile = linear_profile(row_s=1.0)
    first, *later, last = RecomputeEstimator(profile, Schedule(0.3)).layer_s(ratio, reusable, fresh)
    assert first == pytest.approx(reusable + fresh)
    assert later == pytest.approx([kept + fresh for kept in Schedule(0.3).counts(reusable, profile.layers, ratio)[1:-1]])
    assert last == pytest.approx(1)


def test_layer_0_may_run_candidates_alone() -> None:
    """Then it takes what a later layer with so many rows takes, and its stored KV is loaded as well."""
    estimator = RecomputeEstimator(linear_profile(row_s=1.0), Schedule(0.0, first_layer_multiple=2))
    assert estimator.layer_s(0.1, 1000, 40)[0] == pytest.approx(200 + 40)
    assert [estimator.steps(ratio, 1000, 40)[0][1] for ratio in (0.0, 0.1, 1.0)] == [True, True, False]
    assert not RecomputeEstimator(linear_profile(), Schedule(0.3)).steps(0.1, 1000, 40)[0][1]


def test_the_question_reads_the_layers_first() -> None:
    """Its pass stands before the blend's layers and reads all but the last one; without anything to choose there is none."""
    estimator = RecomputeEstimator(linear_profile(row_s=1.0), QuestionAttention.schedule)
    layers = estimator.layers
    steps = estimator.steps(0.1, 1000, 40)
    assert len(steps) == 2 * layers - 1
    assert [step_s for step_s, _ in steps[: layers - 1]] == pytest.approx([40.0] * (layers - 1))
    assert [is_read for _, is_read in steps] == [True] * (layers - 1) + [False] * (layers - 1) + [True]
    assert [step_s for step_s, _ in steps[layers - 1 :]] == estimator.layer_s(0.1, 1000, 40)
    for ratio, reusable in ((0.0, 1000), (1.0, 1000), (0.1, 0)):
        assert len(estimator.steps(ratio, reusable, 40)) == layers


def test_full_reuse_runs_fresh_rows_alone() -> None:
    """At ratio 0 layer 0 runs the fresh rows alone, and exact tokens never run."""
    assert RecomputeEstimator(linear_profile(row_s=1.0), Schedule(0.3)).layer_s(0.0, 900, 100, exact=50) == pytest.approx(
        [*[100] * 10, 1]
    )


def test_a_check_costs_what_it_projects() -> None:
    """Rows that are projected and dropped are paid at the layers that check, and at no others."""
    profile = linear_profile(layers=5, row_s=1.0)
    samples = [
        LayerSample(layer=1, tokens=n, rows=r, projected=p, seconds=r + 0.1 * p)
        for n, r, p in ((1000, 100, 1000), (1000, 100, 0), (500, 400, 500), (500, 250, 0), (2000, 100, 100))
    ]
    measured = dataclasses.replace(profile, blend=(*profile.blend[:2], *samples))
    layers = RecomputeEstimator(measured, Schedule(0.0)).layer_s(0.5, 1000, 0)
    assert layers == pytest.approx([1000, 600, 500, 500, 1 + 0.1 * 500], rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "row_multiply_adds", "gains_nothing", "gains"),
    [(30, 3_540_000, 130, 240), (8, 442_000, 280, 576), (4, 30_000, 280, 800)],
    ids=["SmolLM2-135M", "reader", "tiny"],
)
def test_short_prompts(layers: int, row_multiply_adds: int, gains_nothing: int, gains: int) -> None:
    """Without a profile blending is for the lengths at which it was measured to gain, by the model's size."""
    work = WorkEstimator(
        schedule=QuestionAttention.schedule, layers=layers, row_multiply_adds=row_multiply_adds, device_type="cpu"
    )
    assert work.is_short(0.14, gains_nothing, 22, 25)
    assert not work.is_short(0.14, gains, 22, 25)
    assert not work.is_short(0.14, 0, 22, 25), "nothing is stored, so there is nothing to choose"
    assert not work.is_short(0.14, gains_nothing, 22, exact=2000), "a full prefill would compute what stands before, too"


layers_s = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20)


def test_loading_hides_behind_computing() -> None:
    """Loading that takes less than computing costs its first layer alone; computing that takes less, its last."""
    assert Pipeline.from_layers([1] * 4, [3] * 4, 2).total_s == 1 + 4 * 3
    assert Pipeline.from_layers([3] * 4, [1] * 4, 2).total_s == 4 * 3 + 1
    assert not Pipeline.from_layers([1] * 4, [3] * 4, 2).waits_for_last
    assert Pipeline.from_layers([3] * 4, [1] * 4, 2).waits_for_last


def test_look_ahead() -> None:
    """While a slow layer is computed, no more layers are loaded than there is room for."""
    assert Pipeline.from_layers([0, 1, 1, 1], [3, 0, 0, 0], 4).total_s == 3
    assert Pipeline.from_layers([0, 1, 1, 1], [3, 0, 0, 0], 2).total_s == 4
    assert Pipeline.from_layers([0, 1, 1, 1], [3, 0, 0, 0], 1).total_s == 5


@given(layers=layers_s, lookahead=st.integers(1, 20))
def test_bounds(layers: list[tuple[float, float]], lookahead: int) -> None:
    """The whole is never shorter than either side alone, never longer than both one after the other, and falls with room."""
    load_s, compute_s = [load for load, _ in layers], [compute for _, compute in layers]
    whole = Pipeline.from_layers(load_s, compute_s, lookahead)
    assert max(sum(load_s), sum(compute_s)) <= whole.total_s + 1e-9
    assert whole.total_s <= sum(load_s) + sum(compute_s) + 1e-9
    assert Pipeline.from_layers(load_s, compute_s, lookahead + 1).total_s <= whole.total_s + 1e-9
    # With room for all layers loading never waits: some layer is computed when it comes, and all after it at once.
    longest = max(sum(load_s[: layer + 1]) + sum(compute_s[layer:]) for layer in range(len(layers)))
    assert Pipeline.from_layers(load_s, compute_s, len(layers)).total_s == pytest.approx(longest)
