"""The guard's window, floor, steps and hysteresis, on given agreements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.service.serving.quality_guard import STEP, QualityGuard


def see(guard: QualityGuard, *agreements: float, ratio: float = 0.15) -> list[bool]:
    """Checks of requests served at the present level; which of them raised it."""
    return [guard.record_served(one, level=guard.level, ratio=max(ratio, guard.level)) for one in agreements]


def test_a_mean_at_the_floor_stays() -> None:
    """As long as the mean of the last checks is the floor or above, nothing is raised, and the oldest check is forgotten."""
    guard = QualityGuard(floor=0.5, window=4)
    assert not any(see(guard, 1, 0, 1, 0, 1, 0, 1, 0))
    assert guard.agreement == 0.5
    assert see(guard, 0) == [True]  # 0 1 0 0


def test_raising_needs_no_full_window() -> None:
    """The ratio is raised as soon as the window's mean cannot reach the floor any more."""
    guard = QualityGuard(floor=0.9, window=20)
    assert see(guard, 1, 0, 0.5, 0.5, 0) == [False] * 4 + [True]
    assert guard.agreement is None


def test_steps_up_to_full_recompute() -> None:
    """Each raise is a step above what the checked requests ran at, the last one is full recompute, and there it ends."""
    guard = QualityGuard(floor=1.0, window=1)
    levels = []
    for _ in range(6):
        see(guard, 0.5)
        levels.append(guard.level)
    assert levels == pytest.approx([0.15 + STEP, 0.15 + 2 * STEP, 0.15 + 3 * STEP, 1.0, 1.0, 1.0])


def test_a_high_ratio_is_raised_further() -> None:
    """Where requests ran at more than the level asked for, as the loading controller may choose, the step counts from there."""
    guard = QualityGuard(floor=0.9, window=2)
    see(guard, 1, ratio=0.6)
    see(guard, 0, ratio=0.2)
    assert guard.level == pytest.approx(0.6 + STEP)


def test_checks_of_another_level_do_not_count() -> None:
    """A request that was served before the ratio was raised says nothing about the ratio that it has now."""
    guard = QualityGuard(floor=0.9, window=2)
    see(guard, 0)
    raised = guard.level
    assert not guard.record_served(0.0, level=0.0, ratio=0.15)
    assert not guard.record_lower(1.0, level=0.0)
    assert (guard.level, guard.agreement) == (raised, None)


def test_coming_down_takes_more_than_the_floor() -> None:
    """The level below is taken again when a window of trials agrees half-way between floor and 1, not at the floor."""
    guard = QualityGuard(floor=0.8, window=2)
    see(guard, 0)
    level = guard.level
    assert guard.lower_level == 0.0
    assert [guard.record_lower(one, level=level) for one in (0.8, 0.8, 0.9)] == [False] * 3
    assert guard.record_lower(0.9, level=level)
    assert (guard.level, guard.lower_level) == (0.0, None)


def test_coming_down_from_full_recompute() -> None:
    """Step by step, the way it went up: each level below is tried out anew."""
    guard = QualityGuard(floor=0.9, window=1)
    for _ in range(3):
        see(guard, 0, ratio=0.4)
    went_up = [0.0, 0.4 + STEP, 0.4 + 2 * STEP, 1.0]
    went_up = sorted({min(level, 1.0) for level in went_up})
    came_down = [guard.level]
    while guard.lower_level is not None:
        assert guard.record_lower(1.0, level=guard.level)
        came_down.append(guard.level)
    assert came_down == pytest.approx(went_up[::-1])
    assert not guard.record_lower(1.0, level=0.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60), st.floats(0, 1), st.integers(1, 5))
def test_levels_stay_in_order(seen: list[tuple[float, float]], floor: float, window: int) -> None:
    """Whatever is seen, the level is within 0..1, the one below it is lower, and a floor of 0 never raises."""
    guard = QualityGuard(floor, window)
    for served, lower in seen:
        guard.record_served(served, level=guard.level, ratio=max(0.15, guard.level))
        guard.record_lower(lower, level=guard.level)
        assert 0 <= guard.level <= 1
        assert guard.lower_level is None or guard.lower_level < guard.level
        assert floor or not guard.level
