"""Fidelity: greedy tokens, first token and KV of a blended prompt beside full recompute's."""

import math

import pytest
import torch
from transformers import DynamicCache

from cacheblend.blend.fidelity import equal_tokens_share, first_token_kl_nats, relative_kv_error


@pytest.mark.parametrize(
    ("full", "blended", "share"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], 1.0),
        ([5, 6, 7, 8], [5, 9, 7, 8], 0.25),  # tokens after a difference do not count
        ([5, 6], [9, 6], 0.0),
        ([5, 1], [5, 1], 1.0),  # both ended
        ([5, 6, 7, 8], [5, 1], 0.25),  # blending ended too early
        ([5, 1], [5, 6, 7, 8], 0.5),  # and here too late
    ],
)
def test_equal_tokens_share(full: list[int], blended: list[int], share: float) -> None:
    """The share of full prefill's tokens before the first that differs."""
    assert equal_tokens_share(full, blended) == share


def test_first_token_kl() -> None:
    """KL is that of full prefill's distribution from the blended one, 0 if they are equal."""
    full, blended = (torch.tensor(probabilities).log() for probabilities in ([0.9, 0.1], [0.5, 0.5]))
    assert first_token_kl_nats(full, blended) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert first_token_kl_nats(full, full) == 0


def test_relative_kv_error() -> None:
    """The KV's squared difference over the squared size of full prefill's."""

    def cache(value: float) -> DynamicCache:
        cache = DynamicCache()
        cache.update(torch.full((1, 2, 3, 4), value), torch.full((1, 2, 3, 4), value), 0)
        return cache

    assert relative_kv_error(cache(1.1), cache(1.0)) == pytest.approx(0.01, rel=1e-4)
    assert relative_kv_error(cache(1.0), cache(1.0)) == 0
