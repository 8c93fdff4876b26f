"""The measured speed of a remote tier follows its network."""

import pytest

from cacheblend.store.remote.speed import FRESH_S, MIN_BYTES, SpeedMeter, StreamClock

MB = 10**6


def test_noise_is_averaged_and_a_change_is_not() -> None:
    """A stream that is a little faster or slower moves the speed half-way, one of another network all the way."""
    meter = SpeedMeter()
    assert meter.speed() is None
    meter.observe(0.01, 100 * MB, 1.0)
    meter.observe(0.01, 100 * MB, 1.5)
    speed = meter.speed()
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(100 * MB / 1.25)
    meter.observe(0.05, 100 * MB, 5.0)
    assert meter.speed() == pytest.approx((0.05, 20 * MB))
    meter.observe(0.05, 100 * MB, 1.0)
    assert meter.speed() == pytest.approx((0.05, 100 * MB))


def test_what_says_nothing_is_not_noted() -> None:
    """A few bytes say nothing of the throughput, and after a minute a speed is forgotten."""
    now = [0.0]
    meter = SpeedMeter(lambda: now[0])
    meter.observe(0.01, 100 * MB, 1.0)
    meter.observe(None, MIN_BYTES - 1, 60.0)
    assert meter.speed() == pytest.approx((0.01, 100 * MB))
    now[0] = FRESH_S + 1
    assert meter.speed() is None


def test_a_whole_entry_tells_no_latency() -> None:
    """A read whose first answer is large changes the throughput, its known latency left out, and not the latency."""
    now = [0.0]
    meter = SpeedMeter()
    meter.observe(0.01, 100 * MB, 1.0)
    clock = StreamClock(meter, lambda: now[0], tells_latency=False)
    clock.ask(1)
    now[0] += 0.01 + 0.32
    clock.answer(32 * MB)
    clock.stop()
    assert meter.speed() == pytest.approx((0.01, 100 * MB))
