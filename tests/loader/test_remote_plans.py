"""Plans over a remote tier: the prompt's first chunks are computed while the others come, by what its reads cost lately."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import LAYER_TOKEN_BYTES, linear_profile

from cacheblend.blend import Schedule
from cacheblend.blend.selection import QuestionAttention
from cacheblend.loader import FrontChunk, LoaderConfig, LoadingController, LoadingPlan, TierSpeed

TOKENS = 500  # of a chunk
REMOTE = FrontChunk(TOKENS, ("remote", TOKENS * LAYER_TOKEN_BYTES))
LOCAL = FrontChunk(TOKENS, ("nvme", TOKENS * LAYER_TOKEN_BYTES))
MISS = FrontChunk(TOKENS, None)
CHUNKS = [REMOTE] * 8
ASKING = QuestionAttention.schedule
schedules = st.sampled_from([Schedule(0.0), ASKING])
speeds = st.tuples(st.floats(3, 13).map(lambda power: 10**power), st.floats(0, 1))


def plan(
    rate: float,
    latency_s: float = 0.0,
    chunks: list[FrontChunk] = CHUNKS,
    schedule: Schedule = ASKING,
    most: int | None = None,
) -> LoadingPlan:
    """A plan over chunks, of which at most so many may stand in a front."""
    controller = LoadingController(LoaderConfig(), linear_profile(layers=12, bytes_per_s=1e9), schedule, ())
    speed = TierSpeed(read_s=0.0, bytes_per_s=rate, latency_s=latency_s)
    reads = [chunk.read for chunk in chunks if chunk.read is not None]
    fresh = 32 + sum(chunk.tokens for chunk in chunks if chunk.read is None)
    return controller.plan(reads, TOKENS * len(reads), fresh, front=chunks[:most], remote_speed=speed)


def test_a_fast_remote_is_read_whole_and_a_slow_one_not_at_all() -> None:
    """At memory's speed every chunk is loaded at r*; at a modem's full recompute is chosen."""
    fast, slow = plan(1e13), plan(1e3)
    assert (fast.front_chunks, fast.front_s, fast.full_recompute) == (0, 0.0, False)
    assert fast.ratio == LoaderConfig().quality_ratio
    assert slow.full_recompute
    assert slow.prefill_s == slow.full_s


@given(speed=speeds, schedule=schedules, chunks=st.lists(st.sampled_from([REMOTE, LOCAL, MISS]), min_size=1, max_size=7))
@settings(deadline=None, max_examples=40)
def test_the_best_front_is_found(speed: tuple[float, float], schedule: Schedule, chunks: list[FrontChunk]) -> None:
    """Whatever network and chunks are, no other front makes the prefill more than 2 % sooner, nor does full recompute."""
    made = plan(*speed, chunks, schedule)
    assert 0 <= made.front_chunks <= len(chunks)
    if any(chunk.read for chunk in chunks):
        assert any(chunk.read for chunk in chunks[made.front_chunks :])
        assert made.prefill_s <= made.full_s * 1.05 + 1e-9
        for most in range(len(chunks)):
            other = plan(*speed, chunks, schedule, most)
            assert made.prefill_s <= other.prefill_s * (1.07 if made.full_recompute else 1.02) + 1e-9
    else:
        assert made.front_chunks == 0


def test_loading_and_computing_end_together() -> None:
    """Where loading everything takes longer than the blend, the front takes as long as the loading of the others."""
    made = plan(60 * TOKENS * LAYER_TOKEN_BYTES, chunks=[REMOTE] * 40)
    assert 0 < made.front_chunks < 40
    assert not made.full_recompute
    a_chunk_s = made.front_s / made.front_chunks
    assert made.front_s == pytest.approx(made.load_s, abs=4 * a_chunk_s)
    without = plan(60 * TOKENS * LAYER_TOKEN_BYTES, chunks=[REMOTE] * 40, most=0)
    assert made.prefill_s < 0.9 * without.prefill_s


def test_latency_counts_once() -> None:
    """A round trip is waited for once a prompt, however many chunks and layers it has."""
    near, far = plan(1e13, most=0), plan(1e13, 0.5, most=0)
    assert far.load_s - near.load_s == pytest.approx(0.5)
    assert far.prefill_s <= near.prefill_s + 0.5 + 1e-9


def test_a_remote_that_was_never_read_is_taken_as_the_slowest_tier() -> None:
    """Without a measurement the profile's remote stands, and without that its slowest tier."""
    controller = LoadingController(LoaderConfig(), linear_profile(layers=12, bytes_per_s=1e9), Schedule(0.0), ())
    reads = [chunk.read for chunk in CHUNKS if chunk.read is not None]
    made = controller.plan(reads, TOKENS * len(CHUNKS), 32, front=CHUNKS)
    assert made.load_s > 0
    assert "remote" in made.load_s_by_tier
    controller.record(made, load_s=1.0, compute_s=None)
