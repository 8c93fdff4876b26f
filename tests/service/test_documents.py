"""Documents are listed, pinned, replaced and deleted together with their chunks' KV."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION, TOP_K, OpenEngine, furthest, key_of

from cacheblend.retriever import EmbeddedDocument, Retriever
from cacheblend.service import Engine
from cacheblend.store import ChunkKey, ChunkKV
from cacheblend.store.errors import ConfigError, InputError

FIRST, *OTHERS = DOCUMENTS
ID = str(FIRST["id"])


def keys_of(engine: Engine, id_: str) -> set[ChunkKey]:
    return {key_of(engine, chunk) for chunk in engine.retriever.chunks(id_)}


def stored(engine: Engine) -> set[ChunkKey]:
    return {entry.key for entry in engine.store.ls()}


def test_ls_and_show(engine: Engine) -> None:
    """Every document is listed in the order of adding, with its chunks and what of their KV is stored."""
    engine.ingest(DOCUMENTS)
    statuses = engine.documents.ls()
    assert [status.id for status in statuses] == [document["id"] for document in DOCUMENTS]
    for status in statuses:
        keys = keys_of(engine, status.id)
        assert (status.stored_chunks, status.shared_chunks, status.pinned) == (len(keys), 0, False)
        assert status.own_bytes == status.stored_bytes == sum(entry.bytes for entry in engine.store.ls() if entry.key in keys)
    status, chunks = engine.documents.show(ID)
    assert status == statuses[0]
    assert "".join(chunk.text for chunk in chunks).endswith(str(FIRST["text"])[-20:])


def test_delete(engine: Engine) -> None:
    """A deleted document is in neither index nor store, and the others are untouched."""
    keys = keys_of(engine, ID)
    before = stored(engine)
    assert keys <= before
    deleted = engine.documents.delete(ID)
    assert deleted.stored_chunks == len(keys)
    assert stored(engine) == before - keys
    assert ID not in [status.id for status in engine.documents.ls()]
    answer = engine.answer(QUESTION, top_k=TOP_K)
    assert ID not in {scored.chunk.document_id for scored in answer.chunks}
    assert answer.plan.misses == 0


def test_deletions_do_not_come_between_an_ingests_halves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that is deleted while it is replaced is there with its new text, or gone from index and store."""
    put, deletions = engine.retriever.put, list[threading.Thread]()

    def delete_meanwhile(embedded: EmbeddedDocument) -> bool:
        if not deletions:
            deletions.append(threading.Thread(target=engine.documents.delete, args=(ID,)))
            deletions[0].start()
            deletions[0].join(0.3)
        return put(embedded)

    monkeypatch.setattr(engine.retriever, "put", delete_meanwhile)
    engine.ingest([{"id": ID, "text": "other words"}])
    deletions[0].join()
    assert ID not in [status.id for status in engine.documents.ls()]
    assert engine.store.documents.get(ID) is None


def test_a_deletion_takes_no_chunk_of_a_document_on_its_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that an ingest found stored, and that goes with another document before it ends, is computed then."""
    precompute_documents = engine.fusor.precompute_documents

    def delete_meanwhile(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        monkeypatch.undo()
        engine.documents.delete(ID)
        return precompute_documents(*arguments, **options)

    monkeypatch.setattr(engine.fusor, "precompute_documents", delete_meanwhile)
    report = engine.ingest([{**FIRST, "id": "twin"}, {"id": "new", "text": "words of its own"}])
    assert [status.id for status in engine.documents.ls()][-2:] == ["twin", "new"]
    assert keys_of(engine, "twin") <= stored(engine)
    assert report.evicted == 0


def test_an_unchanged_document_that_is_deleted_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that an ingest found unchanged, and that is deleted before it ends, comes after that."""
    precompute_documents = engine.fusor.precompute_documents

    def delete_meanwhile(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        monkeypatch.undo()
        engine.documents.delete(ID)
        return precompute_documents(*arguments, **options)

    monkeypatch.setattr(engine.fusor, "precompute_documents", delete_meanwhile)
    engine.ingest([FIRST, {"id": "new", "text": "words of its own"}])
    assert keys_of(engine, ID) <= stored(engine)
    assert engine.documents.show(ID)[0].stored_chunks == len(keys_of(engine, ID))


def test_delete_cut_off_between_store_and_index(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion whose process died half-way is done by deleting again."""

    def die(*_: object) -> int:
        raise KeyboardInterrupt

    keys = keys_of(engine, ID)
    with monkeypatch.context() as patch:
        patch.setattr(Retriever, "delete", die)
        with pytest.raises(KeyboardInterrupt):
            engine.documents.delete(ID)
    assert not keys & stored(engine)
    assert engine.documents.show(ID)[0].stored_chunks == 0
    engine.documents.delete(ID)
    with pytest.raises(InputError, match="documents ls"):
        engine.documents.show(ID)


def test_a_new_version_drops_what_is_unused(engine: Engine) -> None:
    """A replaced document keeps the KV of chunks that its new text still has, and loses that of the others."""
    old = keys_of(engine, ID)
    others = stored(engine) - old
    report = engine.ingest([{**FIRST, "text": f"{FIRST['text']} The end of it is another one now."}])
    new = keys_of(engine, ID)
    assert old & new
    assert old - new
    assert stored(engine) == others | new
    assert report.dropped == len(old - new)


def test_shared_chunks_are_stored_once(open_engine: OpenEngine) -> None:
    """A chunk of two documents is counted in both, stored once, and goes with the last of them."""
    engine = open_engine()
    engine.ingest([{"id": "one", "text": "the same words"}, {"id": "two", "text": "the same words"}])
    one, two = engine.documents.ls()
    assert one.shared_chunks == two.shared_chunks == 1
    assert (one.stored_bytes, one.own_bytes) == (engine.store.stats().nvme.bytes, 0)
    engine.documents.delete("one")
    assert engine.store.stats().nvme.entries == 1
    (two,) = engine.documents.ls()
    assert two.own_bytes == two.stored_bytes
    engine.documents.delete("two")
    assert engine.store.stats().nvme.entries == 0


def test_pin(open_ingested: OpenEngine) -> None:
    """A pinned document's KV outlives evictions, new versions of it too, until it is unpinned."""
    with open_ingested() as engine:
        engine.documents.pin(ID)
        pinned = keys_of(engine, ID)
        total = engine.store.stats().nvme.bytes
        assert engine.documents.show(ID)[0].pinned
    with open_ingested(nvme_budget_bytes=total // 2) as engine:
        assert pinned <= stored(engine)
        engine.ingest([{"id": "more", "title": "more", "text": str(OTHERS[0]["text"])[::-1]}])
        assert pinned <= stored(engine)
        engine.ingest([{**FIRST, "text": f"{FIRST['text']} Another end."}])
        assert engine.documents.show(ID)[0].pinned
        engine.documents.unpin(ID)
        assert not engine.documents.show(ID)[0].pinned


@pytest.mark.parametrize("action", ["show", "delete", "pin", "unpin"])
def test_unknown_documents(engine: Engine, action: str) -> None:
    """A document that is not there is named, with where to look."""
    with pytest.raises(InputError, match=r"'nothing'.*documents ls"):
        getattr(engine.documents, action)("nothing")


@pytest.mark.parametrize(("codec", "most"), [("fp8_e4m3", 2.0), ("int8", 0.5), ("int4", 8.0)])
def test_codecs(open_ingested: OpenEngine, codec: str, most: float) -> None:
    """KV of another codec is ingested beside, takes less room, and blends to nearly the same logits."""
    with open_ingested() as engine:
        engine.ingest(DOCUMENTS)
        raw, raw_bytes = engine.answer(QUESTION, top_k=TOP_K), engine.store.stats().nvme.bytes
    with open_ingested(codec=codec) as engine:
        report = engine.ingest(DOCUMENTS)
        assert (report.unchanged, report.computed) == (len(DOCUMENTS), report.chunks)
        small_bytes = engine.store.stats().nvme.bytes - raw_bytes
        assert small_bytes < 0.75 * raw_bytes  # headers are as large as before
        answer = engine.answer(QUESTION, top_k=TOP_K)
        assert (answer.plan.hits, answer.plan.misses) == (TOP_K, 0)
        assert 0 < furthest(answer, raw) < most
        status = engine.documents.show(ID)[0]
        assert status.stored_chunks == 2 * len(keys_of(engine, ID))
        engine.documents.delete(ID)
        assert engine.store.stats().nvme.entries == 2 * sum(len(keys_of(engine, str(document["id"]))) for document in OTHERS)


def test_unknown_codec(open_engine: OpenEngine, tmp_path: Path) -> None:
    """A codec that does not exist is refused with the ones that do, before anything is made."""
    with pytest.raises(ConfigError, match=r"codec='zip'.*int4"):
        open_engine(codec="zip", chunk_tokens=CHUNK_TOKENS)
    assert not (tmp_path / "store").exists()
