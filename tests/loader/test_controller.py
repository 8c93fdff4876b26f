"""The controller hides recompute behind loading, never asks for less than r*, and learns slowly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import LAYER_TOKEN_BYTES, linear_profile

from cacheblend.base.errors import ConfigError
from cacheblend.blend import Schedule
from cacheblend.loader import LoaderConfig, LoadingController, LoadingPlan
from cacheblend.loader.controller import DELAY_ALLOWED, WINDOW
from cacheblend.loader.estimators import Pipeline, RecomputeEstimator, load_seconds

pytestmark = pytest.mark.contract

tokens = st.integers(50, 20_000)
rates = st.floats(5, 11).map(lambda power: 10**power)
ROW_S = 1e-5
R_STAR = LoaderConfig().quality_ratio


def controller_of(rate: float, layers: int = 11, **config: float) -> LoadingController:
    return LoadingController(LoaderConfig(**config), linear_profile(layers=layers, bytes_per_s=rate), Schedule(0.0), ())


def reads(reusable: int, tier: str = "nvme") -> list[tuple[str, int]]:
    return [(tier, reusable * LAYER_TOKEN_BYTES)]


def blend_s(controller: LoadingController, ratio: float, reusable: int, fresh: int) -> Pipeline:
    """The pipeline at a ratio, worked out beside the controller."""
    compute_s = RecomputeEstimator(controller.profile, Schedule(0.0)).layer_s(ratio, reusable, fresh)
    load_s = sum(load_seconds(reads(reusable), controller.profile.tiers).values())
    lookahead = controller.config.lookahead_layers((reusable + fresh) * LAYER_TOKEN_BYTES)
    return Pipeline.from_layers([0.0, *[load_s] * (len(compute_s) - 1)], compute_s, lookahead)


@given(rate=rates, reusable=tokens, fresh=tokens, quality=st.floats(0, 1), layers=st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_ratio_stays_within_its_bounds(rate: float, reusable: int, fresh: int, quality: float, layers: int) -> None:
    """The ratio is never below r*, whatever loading and recompute take."""
    made = controller_of(rate, layers, quality_ratio=quality).plan(reads(reusable), reusable, fresh)
    assert quality <= made.ratio <= 1


@given(rate=rates, reusable=tokens)
@settings(deadline=None, max_examples=60)
def test_what_the_fusor_copies_hides_nothing(rate: float, reusable: int) -> None:
    """A copied tier adds its time to the blend's, whatever that computes, and raises no ratio."""
    made = controller_of(rate)
    copying = LoadingController(made.config, made.profile, Schedule(0.0), ("ram",))
    plan = copying.plan(reads(reusable, "ram"), reusable, 32)
    assert plan.ratio == made.config.quality_ratio
    assert plan.load_s == pytest.approx(made.plan(reads(reusable, "ram"), reusable, 32).load_s)
    blended_s = plan.recompute_s + plan.load_s
    assert plan.prefill_s == pytest.approx(min(blended_s, plan.full_s))
    assert plan.full_recompute == (plan.full_s < blended_s)


def test_copies_beside_reads() -> None:
    """Of two tiers, what is copied adds to computing, and what is read hides behind both."""
    tokens, rate = 1000, 1e9
    plain = controller_of(rate)
    copying = LoadingController(plain.config, plain.profile, Schedule(0.0), ("ram",))
    mixed = [*reads(tokens // 2, "ram"), *reads(tokens // 2)]
    read_alone, both = plain.plan(reads(tokens // 2), tokens, 32), copying.plan(mixed, tokens, 32)
    assert not read_alone.full_recompute
    assert both.prefill_s == pytest.approx(read_alone.prefill_s + both.load_s_by_tier["ram"])


@given(rate=rates, reusable=tokens, fresh=st.integers(1, 500))
@settings(deadline=None, max_examples=60)
def test_recompute_hides_behind_loading(rate: float, reusable: int, fresh: int) -> None:
    """Where loading is the longer side at r*, the ratio is the largest that keeps it so at r*'s TTFT; elsewhere it is r*."""
    controller = controller_of(rate)
    made = controller.plan(reads(reusable), reusable, fresh)
    at_r = blend_s(controller, R_STAR, reusable, fresh)
    if not at_r.waits_for_last:
        assert made.ratio == R_STAR
        return
    most_s = max(at_r.total_s, min(at_r.total_s * (1 + DELAY_ALLOWED), made.full_s))
    at_ratio = blend_s(controller, made.ratio, reusable, fresh)
    assert at_ratio.total_s <= most_s * (1 + 1e-9)
    if made.ratio < 1:
        above = blend_s(controller, made.ratio + 0.0011, reusable, fresh)
        assert above.total_s > most_s * (1 - 1e-3) or not above.waits_for_last


@given(rate=rates, reusable=tokens, fresh=tokens, layers=st.integers(2, 40))
@settings(deadline=None, max_examples=60)
def test_the_faster_way_is_taken(rate: float, reusable: int, fresh: int, layers: int) -> None:
    """Full prefill is taken exactly where blending takes longer, or waits for its loading and is hardly faster."""
    controller = controller_of(rate, layers)
    made = controller.plan(reads(reusable), reusable, fresh)
    blended = blend_s(controller, made.ratio, reusable, fresh)
    most_s = blended.total_s * (1 + DELAY_ALLOWED * blended.waits_for_last)
    assert made.full_recompute == (made.full_s < most_s)
    assert made.prefill_s == pytest.approx(made.full_s if made.full_recompute else blended.total_s)


def test_the_papers_example() -> None:
    """Loading of 3 of 10 ms a layer hides a recompute of three tenths (paper figure 10a), less what layer 0 gives away."""
    made = controller_of(1000 * LAYER_TOKEN_BYTES / 0.003, layers=101).plan(reads(1000), 1000, 0)
    assert made.ratio == pytest.approx(0.3, abs=0.02)
    assert made.load_s == pytest.approx(0.3)
    assert made.recompute_s == pytest.approx(0.01 + 100 * made.ratio * 0.01, rel=0.01)


@given(fresh=tokens, layers=st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_nothing_to_reuse(fresh: int, layers: int) -> None:
    """Without stored KV a request is not called slower than a prefill, so that its misses are noted."""
    made = controller_of(1e9, layers).plan([], 0, fresh)
    assert (made.ratio, made.load_s, made.full_recompute) == (R_STAR, 0, False)
    assert made.prefill_s == made.recompute_s == pytest.approx(ROW_S * (fresh if layers == 1 else (layers - 1) * fresh + 1))


def test_one_layer() -> None:
    """A model of one layer runs it whole either way, so slow loading does not make it recompute in full."""
    assert not controller_of(1.0, layers=1).plan(reads(100), 100, 10).full_recompute
    assert controller_of(1.0, layers=2).plan(reads(100), 100, 10).full_recompute


def plan_once(controller: LoadingController) -> LoadingPlan:
    return controller.plan(reads(1000), 1000, 10)


class TestLearning:
    """Requests that take another time than predicted."""

    def observe(self, controller: LoadingController, count: int, *, load: float = 1.0, compute: float = 1.0) -> None:
        """So many requests, each off the uncorrected profile by these factors."""
        fresh = plan_once(LoadingController(controller.config, controller.profile, Schedule(0.0), ()))
        for _ in range(count):
            made = plan_once(controller)
            compute_s = fresh.full_s if made.full_recompute else made.recompute_s / controller._compute.factor
            controller.record(made, load_s=fresh.load_s * load, compute_s=compute_s * compute)

    def test_a_stable_machine_gives_equal_plans(self) -> None:
        """Requests within a tenth of the prediction leave every later plan as it was."""
        controller = controller_of(5e8)
        before = plan_once(controller)
        self.observe(controller, 5 * WINDOW, load=1.09, compute=0.92)
        assert plan_once(controller) == before

    def test_one_slow_request_moves_nothing(self) -> None:
        """A request that takes twenty times as long does not change the next plan."""
        controller = controller_of(5e8)
        before = plan_once(controller)
        self.observe(controller, 3)
        self.observe(controller, 1, load=20, compute=20)
        self.observe(controller, 3 * WINDOW)
        assert plan_once(controller) == before

    def test_a_slower_tier_is_learnt(self) -> None:
        """After a window of loads that take twice as long, loading is predicted right, and the ratio is the one that hides."""
        controller = controller_of(1e9)
        before = plan_once(controller)
        self.observe(controller, WINDOW - 1, load=2)
        assert plan_once(controller) == before
        self.observe(controller, 1, load=2)
        after, told = plan_once(controller), plan_once(controller_of(0.5e9))
        assert after.load_s == pytest.approx(2 * before.load_s)
        assert after == told

    @pytest.mark.parametrize("factor", [1.15, 3])
    def test_a_slower_device_is_learnt(self, factor: float) -> None:
        """After a window of requests that compute for longer, both ways are predicted as long."""
        controller = controller_of(1e10)
        before = plan_once(controller)
        self.observe(controller, WINDOW, compute=factor)
        after = plan_once(controller)
        assert (after.recompute_s, after.full_s) == pytest.approx((factor * before.recompute_s, factor * before.full_s))

    def test_a_tier_given_up_is_tried_again(self) -> None:
        """Where slow loads have led to full recompute, a window of requests later the tier is read again."""
        controller = controller_of(1e9)
        self.observe(controller, WINDOW, load=14)
        assert plan_once(controller).full_recompute
        self.observe(controller, WINDOW)
        assert not plan_once(controller).full_recompute

    def test_a_tier_that_the_profile_lacks(self) -> None:
        """A tier that was not measured is planned with the slowest one's speed, and learnt like the others."""
        controller = controller_of(1e9)
        before = controller.plan(reads(1000, "tape"), 1000, 10)
        assert before.load_s == plan_once(controller).load_s
        for _ in range(WINDOW):
            controller.record(before, load_s=2 * before.load_s, compute_s=None)
        assert controller.plan(reads(1000, "tape"), 1000, 10).load_s == pytest.approx(2 * before.load_s)
        assert plan_once(controller).load_s == before.load_s

    def test_mixed_tiers_correct_neither(self) -> None:
        """Loads from two tiers at once do not say which of them was slow."""
        controller = controller_of(1e9)
        mixed = [*reads(500, "ram"), *reads(500, "nvme")]
        before = controller.plan(mixed, 1000, 10)
        for _ in range(2 * WINDOW):
            controller.record(controller.plan(mixed, 1000, 10), load_s=100.0, compute_s=None)
        assert controller.plan(mixed, 1000, 10) == before
        assert before.load_s_by_tier == pytest.approx({"ram": 0.005, "nvme": 0.005})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookahead_bytes", 0),
        ("lookahead_bytes", 1.5),
        ("lookahead_bytes", True),
        ("reads_in_flight", 0),
        ("reads_in_flight", 2.0),
        ("quality_ratio", -0.1),
        ("quality_ratio", 1.5),
        ("quality_ratio", float("nan")),
    ],
)
def test_bad_settings(field: str, value: float) -> None:
    """A setting outside its range is refused by name and value."""
    with pytest.raises(ConfigError, match=field) as caught:
        LoaderConfig(**{field: value})
    assert caught.value.value is value
