"""Precomputed chunks: each has its KV after its context, whoever is in the pass, and nothing is run twice."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompts import BOS, assert_same_kv, draw_ids
from tiny_models import CONFIGS, tiny_model

from cacheblend.blend import ChunkContext, Fusor, precompute
from cacheblend.blend.layer_passes import runs
from cacheblend.store import ChunkKV, context_digest

# Equal lengths that are no neighbours, one of a single token, some longer than the windows of the tiny models.
DOCUMENTS = [
    [draw_ids(count, seed=10 * number + place) for place, count in enumerate(counts)]
    for number, counts in enumerate([(9, 14, 1, 20), (14,), (30, 9), (9,)])
]
FILLER = tuple(draw_ids(70, seed=50))
ALL = [(chunks, range(len(chunks))) for chunks in DOCUMENTS]
FLAT = [chunk for chunks in DOCUMENTS for chunk in chunks]


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_in_one_pass_as_alone(name: str) -> None:
    """Chunks of any lengths side by side have the KV that each has alone, in every family."""
    fusor = Fusor(tiny_model(name))
    kvs = list(fusor.precompute_documents(ALL, BOS))
    assert [kv.token_ids for kv in kvs] == [tuple(chunk) for chunk in FLAT]
    for kv, chunk in zip(kvs, FLAT, strict=True):
        assert_same_kv(kv, fusor.precompute(chunk, BOS))


def test_a_fault_shows() -> None:
    """The comparison tells a chunk that saw its neighbour in the pass, and one that stood a place further."""
    fusor = Fusor(tiny_model("llama"))
    first, second = DOCUMENTS[0][0], DOCUMENTS[0][1]
    seen = fusor.precompute(second, (*BOS, *first))
    shifted = fusor.precompute(second, (*BOS, *BOS))
    alone = fusor.precompute(second, BOS)
    for wrong in (seen, shifted):
        with pytest.raises(AssertionError):
            assert_same_kv(ChunkKV(wrong.layers, wrong.token_ids, BOS, wrong.model), alone)


@pytest.mark.parametrize("tokens", [1, 40, 100])
def test_kv_does_not_depend_on_who_is_in_the_pass(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """However documents are put together, a chunk's KV and context are those of its own document."""
    fusor, context = Fusor(tiny_model("qwen3")), ChunkContext(filler_ids=FILLER)
    apart = [kv for chunks in DOCUMENTS for kv in fusor.precompute_document(chunks, BOS, context=context)]
    monkeypatch.setattr(precompute, "PASS_TOKENS", tokens)
    for kv, own in zip(fusor.precompute_documents(ALL, BOS, context), apart, strict=True):
        assert_same_kv(kv, own)
        assert kv.context == own.context


def lengths_run(fusor: Fusor, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of every sequence that is run from now on."""
    ran: list[int] = []
    run_isolated = fusor.decoder.run_isolated

    def counting(sequences: list[list[int]], shared: object = None) -> object:
        ran.extend(map(len, sequences))
        return run_isolated(sequences, shared)

    monkeypatch.setattr(fusor.decoder, "run_isolated", counting)
    return ran


def test_some_of_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are wanted come, in order; a document is read once, to the last of them, and one without any not at all."""
    fusor = Fusor(tiny_model("llama"))
    ran = lengths_run(fusor, monkeypatch)
    wanted = [(DOCUMENTS[0], [2, 1]), (DOCUMENTS[1], []), (DOCUMENTS[2], [0])]
    kvs = list(fusor.precompute_documents(wanted, BOS, ChunkContext()))
    assert [kv.token_ids for kv in kvs] == [tuple(DOCUMENTS[0][1]), tuple(DOCUMENTS[0][2]), tuple(DOCUMENTS[2][0])]
    assert [kv.context != "" for kv in kvs] == [True, True, False]
    assert sorted(ran) == [25, 31]
    assert not list(fusor.precompute_documents([], BOS))


def test_a_long_prefix_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every chunk stands after is not run again with each of them, nor for the next call."""
    fusor, context = Fusor(tiny_model("llama")), ChunkContext(filler_ids=FILLER)
    ran = lengths_run(fusor, monkeypatch)
    for chunks in DOCUMENTS[:2]:
        list(fusor.precompute_document(chunks, BOS, context=context))
    assert ran == [71, 44, 14]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_runs(lengths: list[int]) -> None:
    """Runs cover all rows in order, and neighbours differ in length."""
    found = list(runs(lengths))
    assert [run.start for run in found] == [sum(run.sequences * run.tokens for run in found[:at]) for at in range(len(found))]
    assert [run.tokens for run in found for _ in range(run.sequences)] == lengths
    assert all(one.tokens != other.tokens for one, other in pairwise(found))


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
    fusor = Fusor(tiny_model(name))
    kvs = list(fusor.precompute_document(DOCUMENTS[0], BOS, context=ChunkContext(filler_ids=filler)))
    for index, kv in enumerate(kvs):
        earlier = [token for ids in DOCUMENTS[0][:index] for token in ids]
        alone = fusor.precompute(DOCUMENTS[0][index], (*BOS, *filler, *earlier))
        for own, other in zip(kv.layers, alone.layers, strict=True):
            for x_HTD, y_HTD in zip(own, other, strict=True):
                torch.testing.assert_close(x_HTD, y_HTD, rtol=1e-4, atol=1e-5)
        assert (kv.prefix_ids, kv.context) == (tuple(BOS), context_digest(filler, DOCUMENTS[0][:index]))


def test_long_documents_are_read_in_windows() -> None:
    """A chunk beyond a window has the context of the window that it is new in."""
    fusor, context = Fusor(tiny_model("llama")), ChunkContext(document_tokens=25)
    kvs = list(fusor.precompute_document(DOCUMENTS[0], BOS, context=context))
    expected = [[], DOCUMENTS[0][:1], DOCUMENTS[0][:2], DOCUMENTS[0][2:3]]
    assert [kv.context for kv in kvs] == [context_digest((), earlier) for earlier in expected]
    assert [list(earlier) for earlier in context.earlier(DOCUMENTS[0])] == expected
