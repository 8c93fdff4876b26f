"""What a document does to its chunks: measured when it is precomputed, used where the earlier chunks stand in the prompt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompts import BOS, assert_same_kv, draw_ids
from tiny_models import tiny_model

from cacheblend.blend import FusionConfig, Fusor, Prompt, Schedule, Segment, SelectionStep, TopDeviation, fusor
from cacheblend.blend.document_context import windows
from cacheblend.store import DocumentContext, InputError, token_digest

CHUNKS = [draw_ids(count, seed) for seed, count in enumerate((9, 14, 1, 20))]


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 60))
def test_windows_cover_each_chunk_once(tokens: list[int], most: int) -> None:
    """Every chunk is new in one window, in order; a window of several chunks keeps within its size."""
    new: list[int] = []
    for window in windows(tokens, most):
        assert window.first <= window.new < window.last
        assert window.last - window.first == 1 or sum(tokens[window.first : window.last]) <= most
        new += range(window.new, window.last)
    assert new == list(range(len(tokens)))


def test_windows_keep_what_stands_before() -> None:
    """A later window begins with half a window of the chunks before its new ones."""
    found = [(window.first, window.new, window.last) for window in windows([10] * 9, 40)]
    assert found == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "phi3", "qwen3"])
def test_the_deviation_is_that_of_two_forwards(name: str) -> None:
    """It is that of the chunk's KV alone from its KV behind prefix and document, which `precompute` gives as well."""
    blender = Fusor(tiny_model(name))
    kvs = list(blender.precompute_document(CHUNKS, BOS))
    assert kvs[0].context is None
    for index in (1, 2, 3):
        before = [token for ids in CHUNKS[:index] for token in ids]
        alone, behind = blender.precompute(CHUNKS[index], BOS), blender.precompute(CHUNKS[index], (*BOS, *before))
        expected = torch.zeros(len(CHUNKS[index]))
        for own, other in zip(alone.layers[1:], behind.layers[1:], strict=True):
            for x_HTD, y_HTD in zip(own, other, strict=True):
                expected += (x_HTD - y_HTD).square().sum((0, 2)) / y_HTD.square().sum((0, 2))
        context = kvs[index].context
        assert context is not None
        assert context.before == tuple(token_digest(ids) for ids in CHUNKS[:index])
        torch.testing.assert_close(torch.tensor(context.deviation), expected / (len(alone.layers) - 1), rtol=2e-3, atol=1e-6)
        assert_same_kv(kvs[index], alone)


def test_long_documents_are_read_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks beyond a window have the context of the window that they are new in, and a choice of chunks computes no others."""
    monkeypatch.setattr(fusor, "CONTEXT_TOKENS", 26)
    blender = Fusor(tiny_model("llama"))
    contexts = [kv.context for kv in blender.precompute_document(CHUNKS, BOS)]
    assert [context and len(context.before) for context in contexts] == [None, 1, 2, 1]
    only = list(blender.precompute_document(CHUNKS, BOS, which=[2]))
    assert [kv.token_ids for kv in only] == [tuple(CHUNKS[2])]
    assert only[0].context == contexts[2]


def test_it_counts_where_the_document_stands_before() -> None:
    """Without an earlier chunk in front of it a chunk's context is not known to apply, and so it is 0."""
    blender = Fusor(tiny_model("llama"))
    first, second, *_ = blender.precompute_document(CHUNKS, BOS)
    assert second.context is not None
    one, two, question = Segment(CHUNKS[0], first), Segment(CHUNKS[1], second), Segment(draw_ids(4, seed=9))
    assert torch.equal(Prompt.of([one, two, question]).context_N[9:23], torch.tensor(second.context.deviation))
    for apart in ([two, question], [two, one, question], [Segment(draw_ids(5, seed=8)), two, question]):
        assert not Prompt.of(apart).context_N.any()


def test_the_selection_weighs_it() -> None:
    """Deviations are compared relative to their means; weight 0 leaves the measured one alone."""
    step = SelectionStep(
        1,
        3,
        4,
        torch.arange(4),
        lambda: torch.tensor([8.0, 4.0, 2.0, 2.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.3]),
        torch.arange(4),
    )
    assert TopDeviation(0.25, Schedule(0.0), 0.0).select(step).tolist() == [True, False, False, False]
    assert TopDeviation(0.25, Schedule(0.0), 4.0).select(step).tolist() == [False, False, False, True]


def test_blending_with_it_keeps_the_ratio() -> None:
    """It changes which tokens are recomputed, never how many."""
    blender = Fusor(tiny_model("llama"))
    segments = [Segment(ids, kv) for ids, kv in zip(CHUNKS, blender.precompute_document(CHUNKS, BOS), strict=True)]
    segments = [Segment(BOS), *segments, Segment(draw_ids(6, seed=9))]
    fused = [blender.fuse(segments, FusionConfig(recompute_ratio=0.3, context_weight=weight)) for weight in (0.0, 8.0)]
    rows = [[len(positions) for positions in each.recomputed] for each in fused]
    assert rows[0] == rows[1]
    assert any(not torch.equal(one, other) for one, other in zip(fused[0].recomputed, fused[1].recomputed, strict=True))


def test_a_context_of_other_tokens_is_refused() -> None:
    """As many deviations as tokens."""
    kv = Fusor(tiny_model("llama")).precompute(CHUNKS[0], BOS)
    with pytest.raises(InputError, match="9 tokens has deviations of 2"):
        type(kv)(kv.layers, kv.token_ids, kv.prefix_ids, kv.model, DocumentContext(("00",), (0.1, 0.2)))
