"""Chunks that are not stored, computed alone at once and blended (`holes="precompute"`)."""

from __future__ import annotations

import logging

import pytest
import torch
from engines import DOCUMENTS, TOP_K, OpenEngine, ask, furthest, key_of, kinds
from profiles import linear_profile
from recorded import RecordedAnswer, check_replay

from cacheblend.blend import Schedule
from cacheblend.loader import LoaderConfig, LoadingController
from cacheblend.service import Engine
from cacheblend.store.errors import StoreFullError


@pytest.fixture
def engine(open_ingested: OpenEngine) -> Engine:
    """With the documents ingested."""
    return open_ingested(holes="precompute")


@pytest.mark.parametrize("method", ["blend", "full_reuse"])
def test_a_cold_answer_is_the_warm_one(engine: Engine, method: str) -> None:
    """With some or all chunks missing, the same positions are recomputed as when all are stored, and the logits are equal."""
    warm = ask(engine, method)
    assert (warm.plan.hits, warm.plan.misses) == (TOP_K, 0)
    for missing in (warm.chunks[1:2], warm.chunks):
        for scored in missing:
            engine.store.delete(key_of(engine.fusor, scored))
        cold = ask(engine, method)
        assert (cold.plan.hits, cold.plan.misses) == (TOP_K - len(missing), len(missing))
        assert kinds(cold) == kinds(warm)
        assert [segment.tier for segment in cold.plan.segments].count(None) == len(missing) + 1  # and the question
        assert all(map(torch.equal, cold.plan.recomputed, warm.plan.recomputed))
        assert furthest(cold, warm) <= 1e-5
        assert cold.token_ids == warm.token_ids
        assert engine._holes.waiting == 0
        engine.store.flush()
        assert ask(engine, method).plan.misses == 0


def test_the_context_is_found_as_well(engine: Engine) -> None:
    """What a chunk's document does to it is stored with it, whatever of the document the prompt has."""
    chunk = next(chunk for chunk in engine.retriever.chunks("while") if chunk.position > 0)
    key = engine._prefiller.key(chunk.token_ids)
    stored = engine.store.get(key)
    assert stored is not None
    assert stored.context is not None
    engine.store.delete(key)
    assert ask(engine, documents=[chunk]).plan.misses == 1
    engine.store.flush()
    again = engine.store.get(key)
    assert again is not None
    assert again.context is not None
    assert again.context.before == stored.context.before
    assert again.context.deviation == pytest.approx(stored.context.deviation, rel=2e-3)


def test_brought_documents(engine: Engine) -> None:
    """Chunks of documents that nobody ingested, one of them twice, are computed once each; the recorded plan replays."""
    documents = [{"text": "brought along, " * 30}, {"text": "and another"}, {"text": "and another"}]
    cold = ask(engine, documents=documents)
    assert cold.plan.misses == len(cold.chunks) > 3
    assert "fresh" not in kinds(cold)[:-1]
    assert check_replay(engine.fusor, RecordedAnswer.of(cold)) == "equal"
    engine.store.flush()
    warm = ask(engine, documents=documents)
    assert (warm.plan.hits, warm.plan.misses) == (len(cold.chunks), 0)
    assert furthest(cold, warm) <= 1e-5


def test_a_full_store_keeps_the_second_miss(open_engine: OpenEngine) -> None:
    """Where another entry would be evicted, a chunk that is missed once is blended and forgotten."""
    with open_engine() as engine:
        engine.ingest(DOCUMENTS)
        nvme_bytes = engine.store.stats().nvme.bytes
    engine = open_engine(nvme_budget_bytes=nvme_bytes, holes="precompute")
    found = []
    for _ in range(3):
        found.append(ask(engine, documents=[{"text": "once with once and"}]).plan.misses)
        engine.store.flush()
    assert found == [1, 1, 0]


def test_kv_that_cannot_be_stored(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the answer is the same."""
    warm = ask(engine)
    engine.store.delete(key_of(engine.fusor, warm.chunks[0]))

    def refuse(*_: object, **__: object) -> None:
        raise StoreFullError("no room")

    monkeypatch.setattr(engine.store, "put", refuse)
    with caplog.at_level(logging.WARNING):
        assert furthest(ask(engine), warm) <= 1e-5
    assert "was not stored: no room" in caplog.text


def test_full_recompute_computes_no_hole_first(open_ingested: OpenEngine) -> None:
    """Where the controller expects a full prefill to be sooner than chunks alone and a blend, holes are filled afterwards."""
    engine = open_ingested(holes="precompute", recompute_ratio=None)
    engine._prefiller.controller = LoadingController(
        LoaderConfig(quality_ratio=0.5), linear_profile(layers=4, row_s=1.0), Schedule(0.0)
    )
    engine.store.clear()
    cold = ask(engine)
    assert cold.plan.loading is not None
    assert cold.plan.loading.full_recompute
    assert cold.plan.loading.precompute_s > 0
    assert set(kinds(cold)) == {"fresh"}
    engine.drain()
    assert engine.store.stats().nvme.entries > 0
