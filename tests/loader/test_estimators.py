import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.blend import Fusor
from cacheblend.loader import LoaderConfig, LoadEstimator, RecomputeEstimator, measure_prefill

seconds = st.floats(1e-7, 10)


def test_load_adds_up_the_tiers() -> None:
    """A layer's loading is its bytes over the throughput, summed over tiers."""
    estimator = LoadEstimator(LoaderConfig(ram_bytes_per_s=4e9, nvme_bytes_per_s=1e9))
    assert estimator.layer_s({"ram": 4 * 10**9, "nvme": 5 * 10**8}) == pytest.approx(1.5)
    assert estimator.layer_s({}) == 0


@given(
    linear=st.floats(0, 1e-3),
    quadratic=st.floats(0, 1e-6),
    lengths=st.lists(st.integers(1, 10**5), min_size=2, max_size=2, unique=True),
    other=st.integers(1, 10**5),
)
@settings(deadline=None)
def test_recompute_fits_a_quadratic(linear: float, quadratic: float, lengths: list[int], other: int) -> None:
    """Two lengths of a quadratic, in any order, give the whole quadratic back."""

    def layer_s(tokens: int) -> float:
        return linear * tokens + quadratic * tokens**2

    estimator = RecomputeEstimator([(tokens, layer_s(tokens)) for tokens in lengths])
    scale = max(layer_s(max(lengths)), layer_s(other)) * max(1.0, other / max(lengths)) ** 2
    for tokens in (*lengths, other):
        assert estimator.prefill_layer_s(tokens) == pytest.approx(layer_s(tokens), rel=1e-6, abs=1e-6 * scale + 1e-300)


@given(
    measured=st.lists(st.tuples(st.integers(1, 10**5), seconds), min_size=1, max_size=4, unique_by=lambda pair: pair[0]),
    tokens=st.integers(0, 10**5),
)
@settings(deadline=None)
def test_recompute_of_noisy_lengths(measured: list[tuple[int, float]], tokens: int) -> None:
    """Whatever was measured, the longest length is given back, and more tokens never take less time."""
    estimator = RecomputeEstimator(measured)
    longest, longest_s = max(measured)
    assert estimator.prefill_layer_s(longest) == pytest.approx(longest_s, rel=1e-6)
    assert 0 <= estimator.prefill_layer_s(tokens) <= estimator.prefill_layer_s(tokens + 1)


def test_recompute_of_one_length() -> None:
    """One measured length is taken as linear."""
    estimator = RecomputeEstimator([(200, 4.0)])
    assert [estimator.prefill_layer_s(tokens) for tokens in (0, 50, 200, 400)] == pytest.approx([0, 1, 4, 8])


@given(ratio=st.floats(0, 1), reusable=st.integers(0, 5000), fresh=st.integers(1, 5000))
@settings(deadline=None)
def test_recompute_follows_the_share_of_rows(ratio: float, reusable: int, fresh: int) -> None:
    """A layer's recompute is the prefill's seconds times the share of tokens that run: all of them at ratio 1."""
    estimator = RecomputeEstimator([(256, 0.002), (1024, 0.012)])
    whole = estimator.prefill_layer_s(reusable + fresh)
    assert estimator.layer_s(1.0, reusable, fresh) == pytest.approx(whole)
    share = (ratio * reusable + fresh) / (reusable + fresh)
    assert estimator.layer_s(ratio, reusable, fresh) == pytest.approx(share * whole)
    assert estimator.layer_s(ratio, reusable, fresh) <= whole


def test_measured_prefill(fusor: Fusor) -> None:
    """A layer's prefill is measured at every length asked for, in order."""
    measured = measure_prefill(fusor.decoder, lengths=(8, 64), repeats=1)
    assert [tokens for tokens, _ in measured] == [8, 64]
    assert all(took_s > 0 for _, took_s in measured)
    assert RecomputeEstimator(measured).prefill_layer_s(64) == pytest.approx(measured[1][1])
