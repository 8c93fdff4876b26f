"""Plans over a remote tier: what would come later than it is computed is recomputed, by what its reads cost lately."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import LAYER_TOKEN_BYTES, linear_profile

from cacheblend.blend import Schedule
from cacheblend.loader import LoaderConfig, LoadingController, LoadingPlan, RemoteChunk, TierSpeed

CHUNKS = [RemoteChunk(500 * LAYER_TOKEN_BYTES, 500)] * 8
TOKENS = sum(chunk.tokens for chunk in CHUNKS)


def controller() -> LoadingController:
    return LoadingController(LoaderConfig(), linear_profile(layers=12, bytes_per_s=1e9), Schedule(0.0), ())


def plan(rate: float, latency_s: float = 0.0, chunks: list[RemoteChunk] = CHUNKS) -> LoadingPlan:
    speed = TierSpeed(read_s=0.0, bytes_per_s=rate, latency_s=latency_s)
    return controller().plan([], TOKENS, 32, remote=chunks, remote_speed=speed)


def test_a_fast_remote_is_read_whole_and_a_slow_one_not_at_all() -> None:
    """At memory's speed every chunk is loaded at r*; at a modem's full recompute is chosen."""
    fast, slow = plan(1e13), plan(1e3)
    assert (fast.recomputed_remote, fast.full_recompute, fast.ratio) == (0, False, LoaderConfig().quality_ratio)
    assert slow.full_recompute or slow.recomputed_remote == len(CHUNKS)
    assert slow.prefill_s <= slow.full_s * 1.05


@given(rate=st.floats(3, 13).map(lambda power: 10**power), latency_s=st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_no_plan_is_later_than_full_recompute(rate: float, latency_s: float) -> None:
    """Whatever bandwidth and latency are, the plan is at most 5 % later than full recompute, and than loading everything."""
    made = plan(rate, latency_s)
    assert made.prefill_s <= made.full_s * 1.05 + 1e-9
    assert 0 <= made.recomputed_remote <= len(CHUNKS)
    assert made.latency_s in (0.0, latency_s)
    everything = controller().plan([("nvme", chunk.layer_bytes) for chunk in CHUNKS], TOKENS, 32)
    assert everything.recomputed_remote == 0


def test_between_them_some_chunks_are_computed_while_others_come() -> None:
    """At some rate a part of the chunks is loaded beside the compute of the others, which is sooner than either alone."""
    plans = [plan(10 ** (power / 10)) for power in range(30, 130)]
    parts = [made for made in plans if 0 < made.recomputed_remote < len(CHUNKS) and not made.full_recompute]
    assert parts
    assert all(made.prefill_s < made.full_s for made in parts)


def test_latency_counts_once() -> None:
    """A round trip is waited for once a prompt, however many chunks and layers it has."""
    near, far = plan(1e13), plan(1e13, 0.5)
    assert far.load_s - near.load_s == pytest.approx(0.5)
    assert far.prefill_s <= near.prefill_s + 0.5 + 1e-9


def test_a_remote_that_was_never_read_is_taken_as_the_slowest_tier() -> None:
    """Without a measurement the profile's remote stands, and without that its slowest tier."""
    made = controller().plan([], TOKENS, 32, remote=CHUNKS)
    assert made.load_s > 0
    assert "remote" in made.load_s_by_tier
    controller().record(made, load_s=1.0, compute_s=None)
