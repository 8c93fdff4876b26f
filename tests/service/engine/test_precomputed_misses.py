"""Chunks that are not stored, computed after their context at once and blended (`on_miss="precompute"`)."""

from __future__ import annotations

import logging

import pytest
import torch
from engines import DOCUMENTS, QUESTION, TOP_K, OpenEngine, ask, furthest, key_of, kinds
from profiles import linear_profile
from recorded import RecordedAnswer, check_replay

from cacheblend.base.errors import StoreFullError
from cacheblend.blend import Schedule
from cacheblend.loader import LoaderConfig, LoadingController
from cacheblend.service import Engine
from cacheblend.store import context_digest


@pytest.fixture
def engine(open_ingested: OpenEngine) -> Engine:
    """With the documents ingested; no chunk stands after another of its document."""
    return open_ingested(on_miss="precompute", context_document_tokens=0)


@pytest.mark.parametrize("method", ["blend", "full_reuse"])
def test_a_cold_answer_is_the_warm_one(engine: Engine, method: str) -> None:
    """With some or all chunks missing, the same positions are recomputed as when all are stored, and the logits are equal."""
    engine.store.clear()
    ask(engine, method)
    engine.store.flush()
    warm = ask(engine, method)
    assert (warm.plan.hits, warm.plan.misses) == (TOP_K, 0)
    for missing in (warm.chunks[1:2], warm.chunks):
        for scored in missing:
            engine.store.delete(key_of(engine, scored.chunk))
        cold = ask(engine, method)
        assert (cold.plan.hits, cold.plan.misses) == (TOP_K - len(missing), len(missing))
        assert kinds(cold) == kinds(warm)
        assert [segment.tier for segment in cold.plan.segments].count(None) == len(missing) + 1  # and the question
        assert all(map(torch.equal, cold.plan.recomputed, warm.plan.recomputed))
        assert furthest(cold, warm) <= 1e-5
        assert cold.token_ids == warm.token_ids
        assert engine.background.waiting == 0
        engine.store.flush()
        assert ask(engine, method).plan.misses == 0


def test_what_needs_its_document_is_recomputed(open_ingested: OpenEngine) -> None:
    """Of a document's chunks the first is precomputed; another one is fresh, and is stored later with its context."""
    engine = open_ingested(on_miss="precompute")
    chunks = engine.retriever.chunks("while")[:2]
    keys = [key_of(engine, chunk) for chunk in chunks]
    for key in keys:
        engine.store.delete(key)
    cold = ask(engine, documents=chunks)
    assert kinds(cold) == ["exact", "reused", "fresh", "fresh"]
    assert (cold.plan.hits, cold.plan.misses) == (0, 2)
    engine.drain()
    first, second = (engine.store.get(key) for key in keys)
    assert first is not None
    assert second is not None
    assert (first.context, second.context) == ("", context_digest((), [chunks[0].token_ids]))


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


def test_a_disk_that_is_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where much waits to be written, what was computed is dropped, and missed again."""
    monkeypatch.setattr("cacheblend.service.engine.background_precompute.MAX_PENDING_BYTES", -1)
    engine.store.clear()
    assert [ask(engine).plan.misses for _ in range(2)] == [TOP_K, TOP_K]


def test_a_request_that_ends_between_two_chunks(engine: Engine) -> None:
    """What it computed by then is stored, and nothing stays pinned."""
    engine.store.clear()
    prepared = engine.prepare(QUESTION, top_k=TOP_K, method="blend")
    steps = engine.prefill_steps(prepared)
    assert next(steps) is None
    steps.close()
    engine.store.flush()
    assert ask(engine).plan.hits == 1


def test_a_full_store_keeps_the_second_miss(open_engine: OpenEngine) -> None:
    """Where another entry would be evicted, a chunk that is missed once is blended and forgotten."""
    with open_engine() as engine:
        engine.ingest(DOCUMENTS)
        nvme_bytes = engine.store.stats().nvme.bytes
    engine = open_engine(nvme_budget_bytes=nvme_bytes, on_miss="precompute")
    found = []
    for _ in range(3):
        found.append(ask(engine, documents=[{"text": "once with once and"}]).plan.misses)
        engine.store.flush()
    assert found == [1, 1, 0]


@pytest.mark.parametrize("error", [StoreFullError("no room"), MemoryError("no room")])
def test_kv_that_cannot_be_stored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """It is logged, and the answer is the same."""
    warm = ask(engine)
    engine.store.delete(key_of(engine, warm.chunks[0].chunk))

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(engine.store, "put", refuse)
    with caplog.at_level(logging.WARNING):
        assert furthest(ask(engine), warm) <= 1e-5
    assert f"was not stored: {type(error).__name__}: no room" in caplog.text


def test_full_recompute_computes_no_miss_first(open_ingested: OpenEngine) -> None:
    """Where a full prefill is expected to be faster than precomputed chunks and a blend, misses are computed afterwards."""
    engine = open_ingested(on_miss="precompute", context_document_tokens=0, recompute_ratio=None)
    engine._prefiller.controller = LoadingController(
        LoaderConfig(quality_ratio=0.5), linear_profile(layers=4, row_s=1.0), Schedule(0.0), ()
    )
    engine.store.clear()
    cold = ask(engine)
    assert cold.plan.loading is not None
    assert cold.plan.loading.full_recompute
    assert cold.plan.loading.precompute_s > 0
    assert set(kinds(cold)) == {"fresh"}
    assert engine.store.stats().nvme.entries == 0
    engine.drain()
    assert engine.store.stats().nvme.entries == TOP_K
