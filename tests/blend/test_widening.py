"""A blend whose first token has not settled is the blend at the wide ratio; one that has is that of the first round."""

from typing import Any

import pytest
import torch
from model_families import tiny_model as family_model
from prompts import BOS, chunk, draw_ids, largest_difference, rag_prompt
from tiny_models import tiny_model

from cacheblend.base.errors import ConfigError
from cacheblend.blend import FusionConfig, Fusor, LayerKV, LayerReport, Prompt, ResidentLayers, Segment
from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.blend.fusion import FusionSteps
from cacheblend.blend.selectors import QuestionAttention
from cacheblend.blend.widening import WIDE_RATIO, widening_steps


def rows(*reports: LayerReport) -> int:
    """Rows that ran in all of these."""
    return sum(report.recomputed for report in reports)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n_text", "deepseek_v3"])
def test_a_widened_request_is_a_request_at_the_wide_ratio(name: str) -> None:
    """Bit for bit, with holes, windows, latent KV, and layers that share KV; the first round leaves no trace."""
    fusor = Fusor(family_model(name))
    segments, sink = rag_prompt(fusor), Layers()
    first, wide = (fusor.fuse(segments, FusionConfig(recompute_ratio=ratio)) for ratio in (0.1, WIDE_RATIO))
    widened = FusionSteps(widening_steps(fusor.runner, Prompt.of(segments), 0.1, -1.0, ResidentLayers(), sink)).run()
    assert widened.is_widened
    assert torch.equal(widened.logits, wide.logits)
    assert torch.equal(widened.deviation, wide.deviation)
    assert largest_difference(widened.cache, wide.cache) == 0
    for ran, as_wide in ((widened.recomputed, wide.recomputed), (widened.projected, wide.projected)):
        assert [positions.tolist() for positions in ran] == [positions.tolist() for positions in as_wide]
    assert rows(*widened.selection) > rows(*first.selection, *first.layers)
    assert [layer for layer, _ in sink] == list(range(fusor.runner.geometry.layers))


def test_a_first_token_that_has_settled_ends_a_blend() -> None:
    """Of chunks whose stored KV is exact nothing moves, by a long question either; the movement is that from full reuse."""
    fusor, ids = Fusor(tiny_model("llama")), draw_ids(40, seed=1)
    segments = [Segment(BOS), Segment(ids, fusor.precompute(ids, BOS)), Segment(draw_ids(70, seed=2))]
    config = FusionConfig(recompute_ratio=0.1, max_loss_nats=1e-5)
    settled = fusor.fuse(segments, config)
    assert not settled.is_widened
    assert settled.moved_nats == pytest.approx(0, abs=1e-6)
    assert torch.allclose(settled.logits, fusor.fuse(segments, FusionConfig(recompute_ratio=0.1)).logits, atol=1e-5)
    segments[1:] = [*(chunk(fusor, 20, seed=seed) for seed in (1, 2, 3)), Segment(draw_ids(6, seed=2))]
    moved, reuse, narrow = (
        fusor.fuse(segments, one) for one in (config, FusionConfig(recompute_ratio=0), FusionConfig(recompute_ratio=0.1))
    )
    assert moved.is_widened
    assert moved.moved_nats == pytest.approx(first_token_kl_nats(narrow.logits, reuse.logits), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"recompute_ratio": WIDE_RATIO},
        {"selector": QuestionAttention(WIDE_RATIO)},
        {"recompute_ratio": 0.0},
        {"recompute_ratio": 1.0},
        {"max_loss_nats": None},
    ],
)
def test_no_second_round(config: dict[str, Any]) -> None:
    """None where the first round is as wide, reuses everything, or is exact."""
    fusor = Fusor(tiny_model("llama"))
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(**{"recompute_ratio": 0.2, "max_loss_nats": 1e-9, **config}))
    assert (fused.moved_nats, fused.is_widened) == (None, False)


@pytest.mark.parametrize("nats", [0, -0.1, float("nan"), True, "0.1"])
def test_a_bad_limit_is_refused(nats: object) -> None:
    """Zero would promise what no ratio but 1 keeps; the message says so."""
    with pytest.raises(ConfigError, match="recompute_ratio=1 loses nothing"):
        FusionConfig(max_loss_nats=nats)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="question_attention only"):
        FusionConfig(max_loss_nats=0.1, selector="gradual")


class Layers(list[tuple[int, LayerKV]]):
    """A sink that notes what it is given."""

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        self.append((layer, layer_kv))
