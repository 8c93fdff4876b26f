"""A prompt's first blocks, kept with rotated keys, in front of what is computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import BOS, chunk, draw_ids, largest_difference
from tiny_models import tiny_model

from cacheblend.base.errors import IncompatibleKVError, InputError
from cacheblend.blend import FusionConfig, Fusor, LayerKV, LayerSource, ResidentLayers, Segment
from cacheblend.loader import LayerLoader
from cacheblend.store import BLOCK_TOKENS, BlockChain, PrefixBlocks

FAMILIES = ("llama", "llama-yarn", "mistral-window", "gemma2", "gemma3", "phi3", "qwen2-window", "qwen3")


class Kept(ResidentLayers):
    """Remembers the layers that it hands over."""

    def __init__(self) -> None:
        self.layers: list[LayerKV] = []

    def synchronize(self, layer: int) -> LayerKV:
        """The layer, which is finished when the next one is asked for."""
        self.layers.append(super().synchronize(layer))
        return self.layers[-1]


def keep(fusor: Fusor, token_ids: list[int], blocks: PrefixBlocks) -> BlockChain:
    """Prefill a prompt and put its blocks away."""
    kept = Kept()
    fusor.fuse([Segment(token_ids)], source=kept)
    chain = BlockChain(fusor.fingerprint)
    chain.extend(token_ids)

    def read(layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = kept.layers[layer]
        return whole.k_1HND[0, :, start:stop], whole.v_1HND[0, :, start:stop]

    assert blocks.insert(chain.digests, 0, read) == len(token_ids) // BLOCK_TOKENS
    return chain


def blocks_of(fusor: Fusor) -> PrefixBlocks:
    return PrefixBlocks(2**28, fusor.decoder.windows)


@pytest.mark.parametrize("loader", [False, True], ids=["resident", "loader"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_kept_prefix_gives_full_prefill(name: str, loader: bool) -> None:
    """Behind a kept prefix longer than any window logits and cache are full prefill's; the prefix is not computed again."""
    fusor = Fusor(tiny_model(name))
    ids, rest = draw_ids(70, seed=1), draw_ids(9, seed=2)
    blocks = blocks_of(fusor)
    chain = keep(fusor, ids, blocks)
    with blocks.match(ids, chain) as run:
        assert run is not None
        assert len(run.token_ids) == 64
        segments = [Segment(run.token_ids, run, exact=True), Segment([*ids[64:], *rest])]
        source: LayerSource
        with LayerLoader() as source:
            fused = fusor.fuse(segments, source=source if loader else None)
    reference = fusor.prefill([*ids, *rest])
    assert fused.exact_tokens == 64
    assert [int(positions[0]) for positions in fused.recomputed] == [64] * 4
    assert float((fused.logits - reference.logits).abs().max()) <= 1e-4
    assert fused.cache.get_seq_length() == reference.cache.get_seq_length()
    assert largest_difference(fused.cache, reference.cache) <= 1e-4
    assert fusor.generate(fused, 10, do_sample=False) == fusor.generate(reference, 10, do_sample=False)


@given(kept=st.integers(16, 90), after=st.integers(1, 40), name=st.sampled_from(["gemma3", "mistral-window"]))
@settings(max_examples=25, deadline=None)
def test_whatever_the_lengths(kept: int, after: int, name: str) -> None:
    """Whatever the lengths of prefix and rest, logits are full prefill's."""
    fusor = Fusor(tiny_model(name), fingerprint=name)
    ids, rest = draw_ids(kept, seed=1), draw_ids(after, seed=2)
    blocks = blocks_of(fusor)
    chain = keep(fusor, ids, blocks)
    with blocks.match(ids, chain) as run:
        assert run is not None
        fused = fusor.fuse([Segment(run.token_ids, run, exact=True), Segment([*ids[len(run.token_ids) :], *rest])])
    assert float((fused.logits - fusor.prefill([*ids, *rest]).logits).abs().max()) <= 1e-4


def test_in_front_of_blended_chunks() -> None:
    """In front of chunks a kept prefix is what the same prefix is as a `ChunkKV`, keys rotated by the fusor."""
    fusor = Fusor(tiny_model("gemma3"))
    ids = draw_ids(32, seed=1)
    rest = [chunk(fusor, 17, seed=3), Segment(draw_ids(5, seed=4)), chunk(fusor, 20, seed=5), Segment(draw_ids(6, seed=6))]
    blocks = blocks_of(fusor)
    chain = keep(fusor, ids, blocks)
    config = FusionConfig(recompute_ratio=0.3)
    with blocks.match(ids, chain) as run:
        assert run is not None
        fused = fusor.fuse([Segment(ids, run, exact=True), *rest], config)
    other = fusor.fuse([Segment(ids, fusor.precompute(ids), exact=True), *rest], config)
    assert all(torch.equal(mine, own) for mine, own in zip(fused.recomputed, other.recomputed, strict=True))
    assert float((fused.logits - other.logits).abs().max()) <= 1e-5
    assert (fused.exact_tokens, fused.reusable_tokens) == (32, 37)


def test_bits() -> None:
    """The kept prefix stands in the cache bit for bit as it stood in the prompt that it was taken from."""
    fusor = Fusor(tiny_model("llama"))
    ids = draw_ids(48, seed=1)
    blocks, kept = blocks_of(fusor), Kept()
    fusor.fuse([Segment(ids)], source=kept)
    chain = keep(fusor, ids, blocks)
    with blocks.match(ids[:32], chain) as run:
        assert run is not None
        fused = fusor.fuse([Segment(ids[:32], run, exact=True), Segment(ids[32:])])
    layers: list[object] = list(fused.cache.layers)
    for layer, whole in zip(layers, kept.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :32], whole.k_1HND[:, :, :32])  # type: ignore[attr-defined]  # a cache layer's
        assert torch.equal(layer.values[:, :, :32], whole.v_1HND[:, :, :32])  # type: ignore[attr-defined]  # the same


def test_misuse() -> None:
    """A prefix's KV is refused where its rotated keys would be wrong, and by another model."""
    fusor, other = Fusor(tiny_model("llama")), Fusor(tiny_model("llama", seed=1))
    ids = draw_ids(16, seed=1)
    blocks = blocks_of(fusor)
    chain = keep(fusor, ids, blocks)
    with blocks.match(ids, chain) as run:
        assert run is not None
        with pytest.raises(InputError, match="keys are rotated"):
            Segment(ids, run)
        exact = Segment(ids, run, exact=True)
        with pytest.raises(IncompatibleKVError, match="not computed after the tokens"):
            fusor.fuse([Segment([5], fusor.precompute([5]), exact=True), exact, Segment([5])])
        with pytest.raises(IncompatibleKVError, match="precompute it with this model"):
            other.fuse([exact, Segment([5])])
        wider = Fusor(tiny_model("qwen3"), fingerprint=fusor.fingerprint)
        with pytest.raises(IncompatibleKVError, match="heads, head size, dtype"):
            wider.fuse([exact, Segment([5])])


@pytest.mark.parametrize("name", [*FAMILIES, "mixtral"])
def test_a_prefix_computed_by_itself(name: str) -> None:
    """A prefix computed a layer a step, and all other tokens recomputed, give full prefill's logits and cache."""
    fusor = Fusor(tiny_model(name))
    steps, run = fusor.prefix_steps([*BOS, *draw_ids(22, seed=0)])
    assert [report.layer for report in steps] == list(range(fusor.runner.geometry.layers))
    others = [chunk(fusor, 40, 2), chunk(fusor, 33, 3), Segment(draw_ids(7, seed=30))]
    segments = [Segment(run.token_ids, run, exact=True), *others]
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
    full = fusor.prefill([token for segment in segments for token in segment.token_ids])
    assert float((fused.logits - full.logits).abs().max()) <= 1e-4
    assert largest_difference(fused.cache, full.cache) <= 1e-4
