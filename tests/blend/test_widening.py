"""A blend whose first token has not settled is the blend at the wide ratio; one that has is that of the first round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import tiny_model as family_model
from prompts import BOS, chunk, draw_ids, largest_difference, rag_prompt
from tiny_models import tiny_model

from cacheblend.base.errors import ConfigError
from cacheblend.blend import ExplicitPositions, FusionConfig, Fusor, LayerKV, LayerReport, Prompt, ResidentLayers, Segment
from cacheblend.blend.attention import Rows
from cacheblend.blend.fidelity import first_token_kl_nats
from cacheblend.blend.fusion import FusionSteps
from cacheblend.blend.layer_passes import LinkPass
from cacheblend.blend.widening import WIDE_RATIO, widening_steps

CPU = torch.device("cpu")


def rows(*reports: LayerReport) -> int:
    """Rows that ran in all of these."""
    return sum(report.recomputed for report in reports)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3n_text", "deepseek_v3"])
def test_a_widened_blend_is_a_blend_of_its_tokens(name: str) -> None:
    """With holes, windows, latent KV, and layers that share KV: KV and logits; the first round's rows are among them."""
    fusor = Fusor(family_model(name))
    segments = rag_prompt(fusor)
    first, as_wide = (fusor.fuse(segments, FusionConfig(recompute_ratio=ratio)) for ratio in (0.1, WIDE_RATIO))
    sink = Layers()
    steps = widening_steps(fusor.runner, Prompt.of(segments), 0.1, -1.0, ResidentLayers(), sink)
    widened = FusionSteps(steps).run()
    assert widened.is_widened
    assert [len(rows) for rows in widened.recomputed] == [len(rows) for rows in as_wide.recomputed]
    assert all(
        set(early.tolist()) <= set(late.tolist()) for early, late in zip(first.recomputed, widened.recomputed, strict=True)
    )
    plain = fusor.fuse(segments, FusionConfig(selector=ExplicitPositions(widened.recomputed)))
    assert float((widened.logits - plain.logits).abs().max()) <= 1e-5
    assert largest_difference(widened.cache, plain.cache) <= 1e-5
    assert rows(*widened.selection) > rows(*first.selection, *first.layers)
    assert [layer for layer, _ in sink] == list(range(fusor.runner.geometry.layers))


def test_links_are_attention_to_other_chunks() -> None:
    """By PyTorch's own attention: rows with a weight, keys of other chunks, in the mean over heads."""
    heads, groups, size, tokens = 2, 3, 16, 24
    torch.manual_seed(1)
    positions_S = torch.tensor([3, 9, 10, 20, 23])
    q_1QSD = torch.randn(1, heads * groups, len(positions_S), size)
    k_1HND, v_1HND = torch.randn(2, 1, heads, tokens, size)
    chunk_N = torch.tensor([-1] * 2 + [0] * 8 + [1] * 8 + [2] * 4 + [-1] * 2)
    weight_S = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.0])
    kv_21HND = torch.stack([k_1HND, v_1HND])
    for window in (None, 8):
        rows, layer_kv = Rows.of(positions_S, CPU), LayerKV(kv_21HND, kv_21HND)
        linking = LinkPass(layer_kv, rows, window, scatter=False)
        linking.attend(torch.nn.Identity(), q_1QSD, layer_kv.k_1HND, layer_kv.v_1HND, None)
        visible_SN = torch.arange(tokens) <= positions_S[:, None]
        visible_SN &= torch.arange(tokens) > positions_S[:, None] - (window or tokens)
        scores_QSN = q_1QSD[0] @ k_1HND[0].repeat_interleave(groups, 0).transpose(1, 2) * size**-0.5
        weights_SN = torch.softmax(scores_QSN.masked_fill(~visible_SN, -torch.inf), -1).mean(0)
        others_SN = (chunk_N >= 0) & (chunk_N != chunk_N[positions_S][:, None])
        expected_N = weight_S @ (weights_SN * others_SN)
        torch.testing.assert_close(linking.links_N(weight_S, chunk_N), expected_N, atol=1e-5, rtol=1e-4)


def test_a_first_token_that_has_settled_ends_a_blend() -> None:
    """Of chunks whose stored KV is exact nothing moves; the movement is that from full reuse."""
    fusor, ids = Fusor(tiny_model("llama")), draw_ids(40, seed=1)
    segments = [Segment(BOS), Segment(ids, fusor.precompute(ids, BOS)), Segment(draw_ids(6, seed=2))]
    config = FusionConfig(recompute_ratio=0.1, max_loss_nats=1e-5)
    settled = fusor.fuse(segments, config)
    assert not settled.is_widened
    assert settled.moved_nats == pytest.approx(0, abs=1e-6)
    assert torch.equal(settled.logits, fusor.fuse(segments, FusionConfig(recompute_ratio=0.1)).logits)
    segments[1:2] = [chunk(fusor, 20, seed=seed) for seed in (1, 2, 3)]
    moved, reuse, narrow = (
        fusor.fuse(segments, one) for one in (config, FusionConfig(recompute_ratio=0), FusionConfig(recompute_ratio=0.1))
    )
    assert moved.is_widened
    assert moved.moved_nats == pytest.approx(first_token_kl_nats(narrow.logits, reuse.logits), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"recompute_ratio": WIDE_RATIO},
        {"recompute_ratio": 0.0},
        {"recompute_ratio": 1.0},
        {"selector": "gradual"},
        {"max_loss_nats": None},
    ],
)
def test_no_second_round(config: dict[str, Any]) -> None:
    """None where the first round is as wide, reuses everything, is exact, or selects by something else."""
    fusor = Fusor(tiny_model("llama"))
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(**{"recompute_ratio": 0.2, "max_loss_nats": 1e-9, **config}))
    assert (fused.moved_nats, fused.is_widened) == (None, False)


@pytest.mark.parametrize("nats", [0, -0.1, float("nan"), True, "0.1"])
def test_a_bad_limit_is_refused(nats: object) -> None:
    """Zero would promise what no ratio but 1 keeps; the message says so."""
    with pytest.raises(ConfigError, match="recompute_ratio=1 loses nothing"):
        FusionConfig(max_loss_nats=nats)  # type: ignore[arg-type]


class Layers(list[tuple[int, LayerKV]]):
    """A sink that notes what it is given."""

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        self.append((layer, layer_kv))
