"""The guard's first-token KL: a mean over the same requests as its agreement, which raises nothing."""

from __future__ import annotations

import pytest

from cacheblend.service.serving.quality_guard import Comparison, QualityGuard


def test_mean_kl_of_the_window() -> None:
    """KL is the mean of the window's requests at this level, and begins anew when the ratio is raised."""
    guard = QualityGuard(0.5, 2)
    assert guard.first_token_kl_nats is None
    for kl_nats in (9.0, 0.1, 0.3):
        assert not guard.record_served(1.0, level=0.0, ratio=0.15, kl_nats=kl_nats)
    assert guard.first_token_kl_nats == pytest.approx(0.2)
    guard.record_served(1.0, level=0.5, ratio=0.5, kl_nats=9.0)  # served at a level that is not the present one
    assert guard.first_token_kl_nats == pytest.approx(0.2)
    guard.record_served(0.0, level=0.0, ratio=0.15, kl_nats=0.5)
    assert guard.record_served(0.0, level=0.0, ratio=0.15, kl_nats=0.5)
    assert guard.first_token_kl_nats is None


def test_the_older_name() -> None:
    """`first_token_kl` is the same number."""
    found = Comparison(agreement=1.0, first_token_kl_nats=0.25, relative_kv_error=0.0, recompute_ratio=0.15)
    assert found.first_token_kl == found.first_token_kl_nats == 0.25
