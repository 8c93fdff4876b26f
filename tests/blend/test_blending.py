"""Between full reuse and full prefill: sets, ratios, and the exact arithmetic of a partial recompute."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_replay import replay
from prompts import BOS, chunk, draw_ids, largest_difference, rag_prompt
from tiny_models import CONFIGS, tiny_model

from cacheblend.blend import SELECTORS, ExplicitPositions, FusionConfig, Fusor, Segment, attention, fusion
from cacheblend.blend.attention import Rows
from cacheblend.store import ChunkKV

pytestmark = pytest.mark.contract

DENSE = ["llama", "llama-bias", "llama-linear", "llama-llama3", "llama-yarn", "qwen2"]


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("name", DENSE)
def test_partial_recompute_equals_a_dense_replay(name: str, selector: str) -> None:
    """A dense replay of the same sets with the exact mask, keeping all that was projected, gives the same logits and cache."""
    fusor = Fusor(tiny_model(name))
    segments = rag_prompt(fusor)
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=0.15, selector=selector))
    logits, kept = replay(fusor.model, segments, fused)
    assert float((fused.logits - logits).abs().max()) <= 1e-4
    mine = [x[0] for layer in fused.cache.layers for x in (layer.keys, layer.values)]
    assert max(float((a - b).abs().max()) for a, b in zip(mine, kept, strict=True)) <= 1e-4


@pytest.mark.parametrize("fault", ["mask shifted by one", "bottom-right mask", "rotation off by one", "a stale row"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault that implementations had before moves the logits far beyond the tolerance of the replay."""
    fusor = Fusor(tiny_model("llama"))
    segments = rag_prompt(fusor)
    config = FusionConfig(recompute_ratio=0.3, selector="gradual")
    good = fusor.fuse(segments, config)
    own_rotate = fusor.decoder.rotate

    def attend_at(places: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """Attention takes rows for those at other places, given the rows' own and the number of keys."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, **kw: Any) -> torch.Tensor:
            return attention.attend(q, k, v, Rows.of(places(rows.positions_S, k.shape[2]), k.device), **kw)

        monkeypatch.setattr("cacheblend.blend.layer_passes.attend", attend)

    if fault == "mask shifted by one":
        attend_at(lambda positions, _: (positions - 1).clamp(min=0))
    elif fault == "bottom-right mask":
        attend_at(lambda positions, keys: torch.arange(keys - len(positions), keys))
    elif fault == "rotation off by one":
        monkeypatch.setattr(
            fusor.decoder,
            "rotate",
            lambda layer, k, cos_sin: own_rotate(layer, k, (cos_sin[0].roll(1, 1), cos_sin[1].roll(1, 1))),
        )
    else:
        own_compare = fusion.Fusion._compare

        def forgets_one(self: fusion.Fusion, layer: int, whole: fusion.LayerKV, cos_sin_N: fusion.CosSin) -> torch.Tensor:
            stale = whole.k_1HND[:, :, 20].clone()
            deviation = own_compare(self, layer, whole, cos_sin_N)
            whole.k_1HND[:, :, 20] = stale
            return deviation

        monkeypatch.setattr(fusion.Fusion, "_compare", forgets_one)
    bad = fusor.fuse(segments, config)
    logits, _ = replay(fusor.model, segments, bad)
    assert float((bad.logits - logits).abs().max()) > 1e-2
    good_logits, _ = replay(fusor.model, segments, good)
    assert float((good.logits - good_logits).abs().max()) <= 1e-4


@pytest.mark.parametrize(("selector", "off"), [("gradual", 0.01), ("question_attention", 0.02)])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_sets_are_nested_and_keep_the_ratio(name: str, selector: str, off: float) -> None:
    """At 0.15 the reusable tokens recomputed are 15 % in the mean over layers 1 and up, nested, and within the projected.

    By KV deviation all tokens run layer 0, and layer 1 projects them; the question's attention chooses before layer 0, by a
    pass of its own over the stored KV.
    """
    fusor = Fusor(tiny_model(name))
    fused = fusor.fuse(rag_prompt(fusor), FusionConfig(recompute_ratio=0.15, selector=selector))
    fresh = 6 + 9 + 7
    assert fused.reusable_tokens == len(fused.token_ids) - fresh
    assert abs(fused.recomputed_ratio - 0.15) <= off
    for earlier, later in pairwise(fused.recomputed):
        assert torch.isin(later, earlier).all()
        assert len(later) <= len(earlier)
    for positions, projected in zip(fused.recomputed, fused.projected, strict=True):
        assert torch.equal(positions, positions.unique())
        assert torch.isin(positions, projected).all()
    if selector == "gradual":
        assert len(fused.recomputed[0]) == len(fused.projected[0]) == len(fused.projected[1]) == len(fused.token_ids)
        assert not fused.selection
    else:
        assert torch.equal(fused.recomputed[0], fused.recomputed[1])
        assert len(fused.selection) == fusor.decoder.geometry.layers - 1
        assert len({report.recomputed for report in fused.selection}) == 1


def test_the_tokens_that_deviate_most_are_recomputed() -> None:
    """Layer 1 recomputes exactly the tokens whose stored K and V are farthest from full prefill's."""
    fusor = Fusor(tiny_model("llama"))
    segments = rag_prompt(fusor)
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=0.3, selector="single_shot"))
    full = fusor.prefill(fused.token_ids).cache.layers[1]
    reuse = fusor.fuse(segments, FusionConfig(recompute_ratio=0)).cache.layers[1]
    deviation = (full.keys - reuse.keys).square().sum((0, 1, 3)) + (full.values - reuse.values).square().sum((0, 1, 3))
    reusable = torch.cat([torch.full((len(s.token_ids),), s.kv is not None) for s in segments])
    chosen = torch.zeros_like(reusable)
    chosen[fused.recomputed[1]] = True
    assert deviation[chosen & reusable].min() >= deviation[~chosen & reusable].max()
    assert torch.allclose(fused.deviation[reusable], deviation[reusable], rtol=1e-3, atol=1e-5)


def test_the_paper_s_way_never_reads_layer_0() -> None:
    """A stored layer 0 full of NaN does no harm to HKVD tokens at any ratio but 0, and is used there."""
    fusor = Fusor(tiny_model("llama"))
    good = chunk(fusor, 20, seed=1)
    poisoned = [
        (torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)) if i == 0 else (k, v)
        for i, (k, v) in enumerate(good.kv.layers)
    ]
    segments = [Segment(BOS), Segment(good.token_ids, ChunkKV(poisoned, good.token_ids, BOS)), Segment(draw_ids(4, seed=2))]
    assert torch.isfinite(fusor.fuse(segments, FusionConfig(recompute_ratio=0.15, selector="gradual")).logits).all()
    assert not torch.isfinite(fusor.fuse(segments, FusionConfig(recompute_ratio=0)).logits).all()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_a_recorded_plan_replays(name: str) -> None:
    """The recorded positions of a request give the same sets, logits and cache when they are asked for explicitly."""
    fusor = Fusor(tiny_model(name))
    segments = rag_prompt(fusor)
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=0.2))
    again = fusor.fuse(segments, FusionConfig(selector=ExplicitPositions(fused.recomputed)))
    for mine, theirs in zip((*fused.recomputed, *fused.projected), (*again.recomputed, *again.projected), strict=True):
        assert torch.equal(mine, theirs)
    assert float((fused.logits - again.logits).abs().max()) <= 1e-5
    assert largest_difference(fused.cache, again.cache) <= 1e-5


def test_two_threads_do_not_disturb_each_other() -> None:
    """Requests in several threads, blending and generating, give what each gives alone."""
    fusor = Fusor(tiny_model("gemma3"))
    prompts = [
        [Segment(BOS), chunk(fusor, 20 + n, seed=n), chunk(fusor, 9, seed=50 + n), Segment(draw_ids(5, seed=n))]
        for n in range(6)
    ]

    def answer(segments: list[Segment]) -> tuple[torch.Tensor, list[int]]:
        fused = fusor.fuse(segments, FusionConfig(recompute_ratio=0.3))
        return fused.logits, fusor.generate(fused, max_new_tokens=6, do_sample=False)

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(answer, prompts * 2))
    for (logits, tokens), (other_logits, other_tokens) in zip(alone * 2, together, strict=True):
        assert torch.allclose(logits, other_logits, atol=1e-5)
        assert tokens == other_tokens


def test_fusion_can_be_stopped_between_layers() -> None:
    """Each step is one layer, and closing the generator stops before the next."""
    fusor = Fusor(tiny_model("llama"))
    steps = fusor.fuse_steps(rag_prompt(fusor))
    assert [next(steps).layer, next(steps).layer] == [0, 1]
    assert torch.is_grad_enabled()
    steps.close()
    with pytest.raises(StopIteration):
        next(steps)
