"""Agreement, divergence and deviation of given prompts."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from cacheblend.blend import FusionResult
from cacheblend.service.serving.quality_guard import compare


def prompt(probabilities: list[float], kv: float = 1.0) -> FusionResult:
    cache = DynamicCache()
    cache.update(torch.full((1, 2, 3, 4), kv), torch.full((1, 2, 3, 4), kv), 0)
    return FusionResult(torch.tensor(probabilities).log(), cache, (0, 1, 2), (), (), torch.zeros(3), 2, 0)


@pytest.mark.parametrize(
    ("full", "blended", "agreement"),
    [
        ([5, 6, 7, 8], [5, 6, 7, 8], 1.0),
        ([5, 6, 7, 8], [5, 9, 7, 8], 0.25),  # what follows a difference says nothing
        ([5, 6], [9, 6], 0.0),
        ([5, 1], [5, 1], 1.0),  # both ended
        ([5, 6, 7, 8], [5, 1], 0.25),  # blending ended too soon
        ([5, 1], [5, 6, 7, 8], 0.5),  # and here too late
    ],
)
def test_agreement(full: list[int], blended: list[int], agreement: float) -> None:
    """The share of full prefill's tokens before the first that differs."""
    same = prompt([0.5, 0.5])
    assert compare(same, full, same, blended, 0.15).agreement == agreement


def test_divergence_and_deviation() -> None:
    """KL is taken of full from blended, and the KV's squared difference over full prefill's size."""
    found = compare(prompt([0.9, 0.1]), [0], prompt([0.5, 0.5], kv=1.1), [0], 0.15)
    assert found.first_token_kl == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert found.relative_kv_error == pytest.approx(0.01, rel=1e-4)
    same = compare(prompt([0.9, 0.1]), [0], prompt([0.9, 0.1]), [0], 0.15)
    assert same.first_token_kl == same.relative_kv_error == 0
