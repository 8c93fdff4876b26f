import logging
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import DOCUMENTS, QUESTION, TOP_K, OpenEngine, ask, damage, delete_kv, entry_file, furthest, key_of, kinds
from waiting import wait_until

from cacheblend.base.errors import DamagedEntryError
from cacheblend.retriever import Chunk
from cacheblend.service import Engine
from cacheblend.service.engine.prompt import PromptChunk


def test_a_miss_is_recomputed_and_stored(engine: Engine) -> None:
    """A missing chunk is recomputed in context, chunks after it are still reused, and it is stored for the next request."""
    whole = ask(engine)
    key = key_of(engine, whole.chunks[1].chunk)
    engine.store.delete(key)
    cold = ask(engine)
    assert kinds(cold) == ["exact", "reused", "fresh", "reused", "reused", "fresh"]
    assert (cold.plan.hits, cold.plan.misses) == (TOP_K - 1, 1)
    assert cold.plan.segments[2].key == str(key)
    start = sum(len(segment.token_ids) for segment in cold.plan.segments[:2])
    miss = set(range(start, start + len(cold.plan.segments[2].token_ids)))
    assert all(miss <= set(positions.tolist()) for positions in cold.plan.recomputed)
    engine.drain()
    assert key in engine.store
    filled = ask(engine)
    assert (filled.plan.hits, filled.plan.misses) == (TOP_K, 0)
    # The miss's KV was computed after its context again: one taken from the fused prompt would answer differently.
    assert furthest(filled, whole) <= 1e-6
    assert filled.token_ids == whole.token_ids


@pytest.mark.parametrize("method", ["blend", "full_reuse"])
def test_all_misses_is_full_recompute(engine: Engine, method: str) -> None:
    """With nothing stored an answer is full recompute's, and afterwards everything is."""
    delete_kv(engine)
    cold = ask(engine, method)
    assert (cold.plan.hits, cold.plan.misses, cold.plan.reusable_tokens) == (0, TOP_K, 0)
    assert furthest(cold, ask(engine, "full_recompute")) <= 1e-4
    engine.drain()
    assert ask(engine, method).plan.hits == TOP_K


def test_misses_of_a_request_are_exact(engine: Engine) -> None:
    """With misses and ratio 1.0 the logits are full recompute's."""
    chunks = ask(engine).chunks
    for scored in chunks[::2]:
        engine.store.delete(key_of(engine, scored.chunk))
    assert furthest(ask(engine, recompute_ratio=1.0), ask(engine, "full_recompute")) <= 1e-4


@pytest.mark.parametrize("count", [1, TOP_K])
@pytest.mark.parametrize("method", ["blend", "full_reuse"])
def test_damaged_entries(open_ingested: OpenEngine, caplog: pytest.LogCaptureFixture, method: str, count: int) -> None:
    """However many entries of a request are damaged on NVMe, each is logged, counted, a miss, and written anew."""
    engine = open_ingested(ram_budget_bytes=1)
    keys = [key_of(engine, scored.chunk) for scored in ask(engine, "full_recompute").chunks[:count]]
    whole = ask(engine, method)
    assert {segment.tier for segment in whole.plan.segments[1:-1]} == {"nvme"}
    for key in keys:
        engine.store.delete(key)
    cold = ask(engine, method)
    engine.drain()
    good = {key: entry_file(engine, key).read_bytes() for key in keys}
    damage(engine, keys)
    with caplog.at_level(logging.WARNING):
        answer = ask(engine, method)
    assert (answer.plan.hits, answer.plan.misses) == (TOP_K - count, count)
    assert furthest(answer, cold) <= 1e-6
    assert answer.token_ids == cold.token_ids
    assert engine.store.stats().damaged == count
    assert all(f"entry {key} is a miss and set aside" in caplog.text for key in keys)
    engine.drain()
    assert {key: entry_file(engine, key).read_bytes() for key in keys} == good
    again = ask(engine, method)
    assert again.plan.hits == TOP_K
    assert furthest(again, whole) <= 1e-6


def test_damage_that_stays(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that stay damaged, since they cannot be set aside, cost reuse and not the answer."""

    def damaged(*_: object) -> None:
        raise DamagedEntryError("damaged, and still there")

    for read in ("read_layer", "read_layer_into", "copy_layer"):
        monkeypatch.setattr(f"cacheblend.store.Placement.{read}", damaged)
    answer = ask(engine)
    assert (answer.plan.hits, answer.plan.recompute_ratio) == (0, None)
    assert furthest(answer, ask(engine, "full_recompute")) <= 1e-4


def test_a_failing_precompute(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A precompute that fails, for whatever reason, is logged, and later misses are computed all the same."""
    first, second, *_ = ask(engine).chunks
    precompute_document = engine.fusor.precompute_document

    def failing(chunks: Sequence[Sequence[int]], *arguments: Any) -> object:
        if chunks[-1] == first.chunk.token_ids:
            raise RuntimeError("out of memory")
        return precompute_document(chunks, *arguments)

    monkeypatch.setattr(engine.fusor, "precompute_document", failing)
    for scored in (first, second):
        engine.store.delete(key_of(engine, scored.chunk))
    assert ask(engine).plan.misses == 2
    engine.drain()
    assert "out of memory" in caplog.text
    assert key_of(engine, first.chunk) not in engine.store
    assert key_of(engine, second.chunk) in engine.store
    monkeypatch.undo()
    assert ask(engine).plan.misses == 1
    engine.drain()
    assert ask(engine).plan.misses == 0


def test_precomputes_give_way_to_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request runs no missed chunk is computed, not its own either; when it is done, or has failed, they are."""
    engine.background.postpone_s = 60.0
    missing = key_of(engine, ask(engine).chunks[0].chunk)
    decoder = engine.fusor.decoder
    decode, pause, seen = decoder.decode, threading.Event(), []

    def slow(*arguments: Any) -> Any:
        pause.wait(0.1)  # room for a precompute that does not wait
        seen.append(missing in engine.store)
        return decode(*arguments)

    def failing(*_: object) -> None:
        raise RuntimeError("no")

    engine.store.delete(missing)
    monkeypatch.setattr(decoder, "decode", slow)
    ask(engine, max_tokens=2)
    wait_until(lambda: missing in engine.store)
    assert seen == [False]
    engine.store.delete(missing)
    monkeypatch.setattr(decoder, "decode", failing)
    with pytest.raises(RuntimeError, match="no"):
        ask(engine)
    wait_until(lambda: missing in engine.store)


def test_precomputes_give_way_to_requests_of_all_engines(open_ingested: OpenEngine, tmp_path: Path) -> None:
    """Of engines that share a model one's missed chunks wait while another one's request runs."""
    one = open_ingested()
    one.background.postpone_s = 60.0
    other = open_ingested(store_dir=tmp_path / "other", foreground=one.foreground)
    missing = key_of(one, ask(one).chunks[0].chunk)
    one.store.delete(missing)
    with other.foreground:
        ask(one)
        assert one.background.waiting == 1
        assert missing not in one.store
    one.drain()
    assert missing in one.store


def test_precomputes_do_not_wait_for_ever(engine: Engine) -> None:
    """Requests that never pause postpone the precompute of a missed chunk for a while only."""
    engine.background.postpone_s = 0.01
    missing = key_of(engine, ask(engine).chunks[0].chunk)
    engine.store.delete(missing)
    with engine.foreground:
        ask(engine)
        engine.drain()
        assert missing in engine.store


def test_a_full_store_takes_the_second_miss(open_engine: OpenEngine) -> None:
    """Where another entry would be evicted, a chunk is computed when it is missed again."""
    with open_engine() as engine:
        engine.ingest(DOCUMENTS)
        nvme_bytes = engine.store.stats().nvme.bytes
    engine = open_engine(nvme_budget_bytes=nvme_bytes)

    def misses(word: str) -> int:
        found = ask(engine, documents=[{"text": f"{word} with {word} and"}]).plan.misses
        engine.drain()
        return found

    assert [misses(word) for word in ("once", "else", "then")] == [1, 1, 1]
    assert engine.store.stats().nvme.evictions == 0
    assert [misses("once"), misses("once")] == [1, 0]
    assert engine.store.stats().nvme.evictions == 1


@pytest.mark.parametrize("salt", ["", "a salt"])
@pytest.mark.parametrize("when", ["queued", "computed"])
@pytest.mark.parametrize("change", ["delete", "replace"])
def test_a_miss_of_a_document_that_is_gone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, change: str, when: str, salt: str
) -> None:
    """What a request missed of a document that is deleted or replaced before it is computed, or meanwhile, is not stored."""
    engine.background.postpone_s = 60.0
    document, precompute_document = str(DOCUMENTS[0]["id"]), engine.fusor.precompute_document
    chunks = engine.retriever.chunks(document)
    delete_kv(engine)

    def act() -> None:
        if change == "delete":
            engine.documents.delete(document)
        else:
            engine.ingest([{"id": document, "text": "quite other words"}])

    def late(*arguments: Any) -> object:
        computed = precompute_document(*arguments)
        if when == "computed":
            act()
        return computed

    monkeypatch.setattr(engine.fusor, "precompute_document", late)
    with engine.foreground:  # so that the precompute does not begin
        list(engine.prefill_steps(engine.prepare("x", documents=chunks[:1], cache_salt=salt)))
        if when == "queued":
            act()
    engine.drain()
    left = {key_of(engine, chunk) for one in DOCUMENTS for chunk in known_chunks(engine, str(one["id"]))}
    assert {entry.key for entry in engine.store.ls()} <= left
    assert not [entry for entry in engine.store.ls() if entry.key.namespace]


def known_chunks(engine: Engine, document: str) -> list[Chunk]:
    return engine.retriever.chunks(document) if engine.retriever.version(document) else []


def test_what_a_changed_instruction_makes_goes_with_its_document(open_ingested: OpenEngine) -> None:
    """KV that is computed after requests after the head has changed belongs to its document, as what was ingested does."""
    engine = open_ingested(instruction="Quite another instruction.\n\n")
    before = {entry.key for entry in engine.store.ls()}
    document = ask(engine).chunks[0].chunk.document_id
    engine.drain()
    made = {entry.key for entry in engine.store.ls()} - before
    assert len(made) == TOP_K
    for one in {scored.chunk.document_id for scored in ask(engine).chunks}:
        engine.documents.delete(one)
    assert document not in engine.retriever.ids()
    assert not made & {entry.key for entry in engine.store.ls()}


def test_a_store_that_has_forgotten_its_documents(open_ingested: OpenEngine) -> None:
    """Where the store's catalog was lost, what is computed after a request notes its document again, and goes with it."""
    with open_ingested() as engine:
        folder = Path(engine.config.store_dir) / "kv"
    shutil.rmtree(folder)
    engine = open_ingested()
    chunks = ask(engine).chunks
    engine.drain()
    assert ask(engine).plan.misses == 0
    for document in {scored.chunk.document_id for scored in chunks}:
        engine.documents.delete(document)
    assert engine.store.stats().nvme.entries == 0


def test_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces' missed chunks are computed in turn, and beyond the most that may wait the longest line loses its last."""
    engine.background.max_waiting, engine.background.postpone_s = 5, 60.0
    precompute_document, filled = engine.fusor.precompute_document, list[int]()

    def noting(chunks: Sequence[Sequence[int]], *arguments: Any) -> object:
        filled.append(chunks[0][0])
        return precompute_document(chunks, *arguments)

    monkeypatch.setattr(engine.fusor, "precompute_document", noting)
    with engine.foreground:  # so that the precompute does not begin
        for namespace, first_ids in (("many", range(10, 17)), ("few", range(20, 22)), ("one", range(30, 31))):
            for first_id in first_ids:
                token_ids = (first_id, 5, 6)
                engine.background.submit(PromptChunk(token_ids, engine._encoder.key(token_ids, (), namespace)))
    engine.drain()
    assert filled == [10, 20, 30, 11, 21]


def test_an_evicted_corpus_is_still_answered(open_engine: OpenEngine) -> None:
    """With room for a few entries alone, answers stay right while entries come and go."""
    engine = open_engine(nvme_budget_bytes=150_000, ram_budget_bytes=1)
    engine.ingest_stream(DOCUMENTS)
    for question in (QUESTION, "How is a class defined?", "What does with do?") * 2:
        blend = engine.answer(question, num_chunks=TOP_K, recompute_ratio=1.0)
        full = engine.answer(question, num_chunks=TOP_K, method="full_recompute")
        assert furthest(blend, full) <= 1e-4
        engine.drain()
