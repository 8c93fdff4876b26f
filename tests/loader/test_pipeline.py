"""Layers on one clock: loading beside computing, look-ahead bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.loader.estimators import Pipeline

seconds = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20)


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


@given(layers=seconds, lookahead=st.integers(1, 20))
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
