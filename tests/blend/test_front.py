"""A prompt's front: computed exactly before the blend, while a source brings the rest."""

from __future__ import annotations

import pytest
import torch
from prompts import BOS, chunk, draw_ids, largest_difference
from tiny_models import tiny_model

from cacheblend.blend import (
    ExplicitPositions,
    FrontedLayers,
    FusionConfig,
    FusionResult,
    Fusor,
    LayerReport,
    LayerSource,
    Prompt,
    ResidentLayers,
    Segment,
)
from cacheblend.loader import LayerLoader

FAMILIES = ("llama", "llama-yarn", "mistral-window", "gemma2", "gemma3", "mixtral", "phi3", "qwen3")


def front_of(fusor: Fusor, segments: list[Segment]) -> tuple[Segment, list[LayerReport]]:
    """The first segments as an exact one."""
    steps, reports = fusor.front_steps(segments), list[LayerReport]()
    while True:
        try:
            reports.append(next(steps))
        except StopIteration as done:
            return Segment(done.value.token_ids, done.value, exact=True), reports


def prompt_of(fusor: Fusor) -> tuple[list[Segment], list[Segment]]:
    """A prompt's first segments, an exact one among them, and its others."""
    head = [*BOS, *draw_ids(5, seed=0)]
    chunks = [chunk(fusor, tokens, seed) for tokens, seed in ((17, 1), (40, 2), (33, 3))]
    exact = Segment(head, fusor.precompute(head), exact=True)
    return [exact, Segment(chunks[0].token_ids)], [*chunks[1:], Segment(draw_ids(7, seed=30))]


def fuse_after_front(fusor: Fusor, config: FusionConfig, source: LayerSource) -> FusionResult:
    """Blend with the source under way before the front is computed."""
    first, others = prompt_of(fusor)
    unread = Segment([token for segment in first for token in segment.token_ids])
    source.start(Prompt.of([unread, *others]), fusor.runner.geometry, reuse_layer_0=True)
    front, _ = front_of(fusor, first)
    assert front.kv is not None
    fused = fusor.fuse([front, *others], config, FrontedLayers(source, front.kv))
    return fused.with_front(len(first[0].token_ids))


@pytest.mark.parametrize("selector", ["question_attention", "gradual", "first_tokens"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_front_is_as_a_miss_in_its_place(name: str, selector: str) -> None:
    """A blend behind a front is replayed, to float rounding, by its positions over a prompt whose first chunk is a miss."""
    fusor = Fusor(tiny_model(name))
    first, others = prompt_of(fusor)
    config = FusionConfig(recompute_ratio=0.3, selector=selector)
    with LayerLoader() as loader:
        fused = fuse_after_front(fusor, config, loader)
    replayed = FusionConfig(selector=ExplicitPositions(fused.recomputed))
    plain = fusor.fuse([*first, *others], replayed)
    for got, wanted in zip(fused.recomputed, plain.recomputed, strict=True):
        assert torch.equal(got, wanted)
    assert (fused.exact_tokens, fused.reusable_tokens) == (plain.exact_tokens, plain.reusable_tokens)
    assert fused.recomputed_ratio == pytest.approx(plain.recomputed_ratio)
    assert fused.recomputed_ratio == pytest.approx(0.3, abs=0.05)
    assert float((fused.logits - plain.logits).abs().max()) <= 1e-4
    assert largest_difference(fused.cache, plain.cache) <= 1e-4
    assert fusor.generate(fused, 4, do_sample=False) == fusor.generate(plain, 4, do_sample=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_at_ratio_one_it_is_full_prefill(name: str) -> None:
    """A front, and all of the others recomputed, give full prefill's logits and cache."""
    fusor = Fusor(tiny_model(name))
    first, others = prompt_of(fusor)
    fused = fuse_after_front(fusor, FusionConfig(recompute_ratio=1.0), ResidentLayers())
    whole = fusor.prefill([token for segment in (*first, *others) for token in segment.token_ids])
    assert float((fused.logits - whole.logits).abs().max()) <= 1e-4
    assert largest_difference(fused.cache, whole.cache) <= 1e-4


def test_a_front_takes_a_step_a_layer() -> None:
    """A server can put others' work between the layers of a front."""
    fusor = Fusor(tiny_model("llama"))
    _, reports = front_of(fusor, prompt_of(fusor)[0])
    assert [report.layer for report in reports] == list(range(fusor.runner.geometry.layers))
