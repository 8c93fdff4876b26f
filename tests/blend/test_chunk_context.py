"""Chunks computed after their context: the filler and their document's earlier text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompts import BOS, draw_ids
from tiny_models import tiny_model

from cacheblend.blend import ChunkContext, Fusor
from cacheblend.store import ChunkKey, ConfigError, context_digest

CHUNKS = [draw_ids(count, seed) for seed, count in enumerate((9, 14, 1, 20))]
FILLER = tuple(draw_ids(70, seed=50))


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 60))
def test_windows_cover_each_chunk_once(tokens: list[int], limit: int) -> None:
    """Every chunk is new in one window, in order; a window of several chunks keeps within its size."""
    new: list[int] = []
    for window in ChunkContext(document_tokens=limit).windows([[0] * count for count in tokens]):
        assert window.first <= window.new < window.last
        assert window.last - window.first == 1 or sum(tokens[window.first : window.last]) <= limit
        new += range(window.new, window.last)
    assert new == list(range(len(tokens)))


def test_windows_begin_with_earlier_chunks() -> None:
    """A later window begins with half a window of the chunks before its new ones."""
    windows = ChunkContext(document_tokens=40).windows([[0] * 10] * 9)
    found = [(window.first, window.new, window.last) for window in windows]
    assert found == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 9)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "phi3", "qwen3"])
@pytest.mark.parametrize("filler", [(), FILLER[:5], FILLER])
def test_a_chunk_has_the_kv_that_it_has_after_its_context(name: str, filler: tuple[int, ...]) -> None:
    """Prefix, filler and earlier text stand before it, whether their KV is shared or computed with it."""
    blender = Fusor(tiny_model(name))
    kvs = list(blender.precompute_document(CHUNKS, BOS, context=ChunkContext(filler_ids=filler)))
    for index, kv in enumerate(kvs):
        earlier = [token for ids in CHUNKS[:index] for token in ids]
        alone = blender.precompute(CHUNKS[index], (*BOS, *filler, *earlier))
        for own, other in zip(kv.layers, alone.layers, strict=True):
            for x_HTD, y_HTD in zip(own, other, strict=True):
                torch.testing.assert_close(x_HTD, y_HTD, rtol=1e-4, atol=1e-5)
        assert (kv.prefix_ids, kv.context) == (tuple(BOS), context_digest(filler, CHUNKS[:index]))


def test_without_a_document_each_chunk_stands_after_the_filler() -> None:
    """`document_tokens=0` leaves the earlier text out."""
    blender = Fusor(tiny_model("llama"))
    kvs = list(blender.precompute_document(CHUNKS, BOS, context=ChunkContext(filler_ids=FILLER, document_tokens=0)))
    assert {kv.context for kv in kvs} == {context_digest(FILLER, [])}


def test_long_documents_are_read_in_windows() -> None:
    """A chunk beyond a window has the context of the window that it is new in."""
    blender, context = Fusor(tiny_model("llama")), ChunkContext(document_tokens=25)
    kvs = list(blender.precompute_document(CHUNKS, BOS, context=context))
    expected = [[], CHUNKS[:1], CHUNKS[:2], CHUNKS[2:3]]
    assert [kv.context for kv in kvs] == [context_digest((), earlier) for earlier in expected]
    assert [list(earlier) for earlier in context.earlier(CHUNKS)] == expected


def test_a_context_names_what_it_holds() -> None:
    """Other filler, other earlier text, or the same tokens shared out otherwise are other contexts; nothing is no context."""
    digests = [
        context_digest((), []),
        context_digest((1, 2), []),
        context_digest((), [(1, 2)]),
        context_digest((1,), [(2,)]),
        context_digest((1, 2), [(3,)]),
    ]
    assert digests[0] == ""
    assert len(set(digests)) == len(digests)
    assert context_digest((1,), [(2,), (3,)]) == context_digest((1,), [(2, 3)])


def test_the_context_is_part_of_the_key() -> None:
    """KV computed after another context is another entry; without a context the key is what it always was."""
    keys = {str(ChunkKey.of([1, 2], prefix_ids=BOS, context=context, model="m")) for context in ("", "aa", "bb")}
    assert len(keys) == 3
    assert str(ChunkKey.of([1, 2], prefix_ids=BOS, model="m")) in keys


def test_a_negative_window_is_refused() -> None:
    """The error names the field."""
    with pytest.raises(ConfigError, match="document_tokens=-1"):
        ChunkContext(document_tokens=-1)
