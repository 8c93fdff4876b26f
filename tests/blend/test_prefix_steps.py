"""A prompt's prefix, computed by itself: its KV is full prefill's, for the prompts that begin with it."""

from __future__ import annotations

import pytest
from prompts import BOS, chunk, draw_ids, largest_difference
from tiny_models import tiny_model

from cacheblend.blend import FusionConfig, Fusor, LayerReport, Segment
from cacheblend.store import PrefixRun

FAMILIES = ("llama", "llama-yarn", "mistral-window", "gemma2", "gemma3", "mixtral", "phi3", "qwen3")


def prefix_of(fusor: Fusor, token_ids: list[int]) -> tuple[PrefixRun, list[LayerReport]]:
    """The prefix's KV, and the report of each step."""
    steps, run = fusor.prefix_steps(token_ids)
    return run, list(steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_at_ratio_one_it_is_full_prefill(name: str) -> None:
    """A prefix computed by itself, and all other tokens recomputed, give full prefill's logits and cache."""
    fusor = Fusor(tiny_model(name))
    run, _ = prefix_of(fusor, [*BOS, *draw_ids(22, seed=0)])
    segments = [
        Segment(run.token_ids, run, exact=True),
        chunk(fusor, 40, 2),
        chunk(fusor, 33, 3),
        Segment(draw_ids(7, seed=30)),
    ]
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
    full = fusor.prefill([token for segment in segments for token in segment.token_ids])
    assert float((fused.logits - full.logits).abs().max()) <= 1e-4
    assert largest_difference(fused.cache, full.cache) <= 1e-4


def test_a_prefix_takes_a_step_a_layer() -> None:
    """A server can put others' work between the layers of a prefix."""
    fusor = Fusor(tiny_model("llama"))
    _, reports = prefix_of(fusor, draw_ids(9, seed=0))
    assert [report.layer for report in reports] == list(range(fusor.runner.geometry.layers))
