"""Two engines of two folders over one index in a real PostgreSQL server, and over one remote tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import DOCUMENTS, OpenEngine, ask, key_of, kinds
from postgres import PostgresServer
from waiting import wait_until

from cacheblend.base.errors import DocumentChangedError, IndexUnreachableError, InputError
from cacheblend.service import Engine
from cacheblend.service.engine.chunk_contexts import ChunkEncoder
from cacheblend.store import ChunkKey, ChunkKV

ID = "while"
FIRST = next(document for document in DOCUMENTS if document["id"] == ID)
OTHER = {**FIRST, "text": "Other words about loops, and nothing of what was said before."}
SECRET = "a secret of the deployment"


@pytest.fixture
def replicas(postgres: PostgresServer, open_engine: OpenEngine, tmp_path: Path) -> tuple[Engine, Engine]:
    """Two engines, whose KV is shared in a folder."""
    pytest.importorskip("obstore", reason="obstore is not installed; pip install 'cacheblend[objects]'")
    return open_replicas(open_engine, tmp_path, postgres.new_database(), remote=f"file://{tmp_path}/remote")


def open_replicas(open_engine: OpenEngine, folder: Path, url: str, **options: object) -> tuple[Engine, Engine]:
    secret = {"remote_secret": SECRET} if "remote" in options else {}
    first, second = (open_engine(store_dir=folder / name, index=url, **secret, **options) for name in ("one", "two"))
    return first, second


def stored(engine: Engine) -> set[str]:
    engine.store.flush()
    return {str(entry.key) for entry in engine.store.ls()}


def keys_of(engine: Engine, id_: str = ID) -> list[ChunkKey]:
    return [key_of(engine, chunk) for chunk in engine.retriever.chunks(id_)]


def names(keys: list[ChunkKey]) -> set[str]:
    return {str(key) for key in keys}


def test_uploaded_at_one_asked_at_the_other(replicas: tuple[Engine, Engine]) -> None:
    """What one replica ingested the other finds, blends from the remote tier, and answers word for word the same."""
    one, two = replicas
    assert one.ingest(DOCUMENTS).added == len(DOCUMENTS)
    assert one.store.flush_remote(10)
    mine, other = ask(one), ask(two)
    assert kinds(mine) == kinds(other)
    assert other.plan.misses == 0
    assert {segment.tier for segment in other.plan.segments if segment.key} == {"remote"}
    assert other.token_ids == mine.token_ids
    assert [status.id for status in two.documents.ls()] == [document["id"] for document in DOCUMENTS]


def test_a_miss_at_one_is_a_hit_at_the_other(replicas: tuple[Engine, Engine]) -> None:
    """A chunk that one replica missed, and computed afterwards, is the other's hit."""
    one, two = replicas
    one.ingest(DOCUMENTS)
    assert one.store.flush_remote(10)
    for key in (key for id_ in one.retriever.ids() for key in keys_of(one, id_)):
        one.store.delete(key)
    assert one.store.flush_remote(10)
    assert ask(two).plan.hits == 0
    two.drain()
    assert two.store.flush_remote(10)
    again = ask(one)
    assert again.plan.misses == 0
    assert {segment.tier for segment in again.plan.segments if segment.key} == {"remote"}


def test_uploaded_again_at_the_other(replicas: tuple[Engine, Engine]) -> None:
    """The same document uploaded at another replica is copied from the remote tier, and not computed again."""
    one, two = replicas
    one.ingest([FIRST])
    assert one.store.flush_remote(10)
    report = two.ingest([FIRST])
    assert (report.unchanged, report.computed) == (1, 0)
    assert names(keys_of(two)) <= stored(two)


@pytest.mark.parametrize("how", ["asked", "uploaded"])
def test_a_deletion_is_everybodys(replicas: tuple[Engine, Engine], how: str) -> None:
    """A document deleted at one replica is found at no other from then on, and its KV goes there within a second or so.

    KV that came by a request, as a copy of the remote tier's, goes as well as KV that was ingested.
    """
    one, two = replicas
    one.ingest(DOCUMENTS)
    assert one.store.flush_remote(10)
    if how == "uploaded":
        two.ingest([FIRST])
    else:
        two.answer("Say while.", documents=two.retriever.chunks(ID), recompute_ratio=0.15)
    gone = names(keys_of(two))
    assert gone & stored(two)
    one.documents.delete(ID)
    assert ID not in {status.id for status in two.documents.ls()} | {status.id for status in two.documents.page(99)[0]}
    assert ID not in {scored.chunk.document_id for scored in two.search("while", 9)}
    wait_until(lambda: not gone & stored(two))
    assert two.store.documents.get(ID) is None
    with pytest.raises(InputError, match="no document"):
        two.documents.delete(ID)
    ask(two)
    two.drain()
    assert not gone & (stored(one) | stored(two))


def test_a_replacement_is_everybodys(replicas: tuple[Engine, Engine]) -> None:
    """Of a document that was replaced at one replica the others have no KV of its old text, and use that of the new one."""
    one, two = replicas
    for engine in replicas:
        engine.ingest(DOCUMENTS)
    old = names(keys_of(two))
    one.ingest([OTHER])
    assert one.store.flush_remote(10)
    wait_until(lambda: not old & stored(two))
    answer = two.answer("Say while.", documents=two.retriever.chunks(ID), recompute_ratio=0.15)
    assert answer.plan.misses == 0
    assert "Other words" in answer.chunks[0].chunk.text


def test_a_deletion_while_a_replica_was_away(postgres: PostgresServer, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A replica that comes back drops the KV of what was deleted or replaced while it was closed, and of nothing else."""
    url = postgres.new_database()
    one, two = open_replicas(open_engine, tmp_path, url)
    two.ingest(DOCUMENTS)
    gone, kept = names(keys_of(two)) | names(keys_of(two, "for")), names(keys_of(two, "class"))
    two.close()
    one.documents.delete(ID)
    one.ingest([{"id": "for", "text": "quite another text"}])
    again = open_engine(store_dir=tmp_path / "two", index=url)
    wait_until(lambda: not gone & stored(again))
    assert kept <= stored(again)


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_changed_elsewhere_while_it_was_uploaded(
    postgres: PostgresServer, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """An upload whose document another replica changed meanwhile is refused, and leaves nothing, of its companions too."""
    one, two = open_replicas(open_engine, tmp_path, postgres.new_database())
    one.ingest([FIRST])
    precompute_documents = two.fusor.precompute_documents

    def change_meanwhile(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        monkeypatch.undo()
        one.documents.delete(ID) if change == "deleted" else one.ingest([OTHER])
        return precompute_documents(*arguments, **options)

    monkeypatch.setattr(two.fusor, "precompute_documents", change_meanwhile)
    with pytest.raises(DocumentChangedError, match=ID):
        two.ingest([{**FIRST, "text": "a third text"}, {"id": "new", "text": "words of its own"}])
    assert two.retriever.ids() == ([] if change == "deleted" else [ID])
    assert not stored(two)


def test_a_missed_chunk_of_a_document_that_is_gone(
    postgres: PostgresServer, open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that is computed in the background after its document was deleted at another replica is not stored."""
    one, two = open_replicas(open_engine, tmp_path, postgres.new_database())
    one.ingest([FIRST])
    compute, gone = ChunkEncoder.compute, names(keys_of(two))

    def delete_meanwhile(*arguments: Any) -> ChunkKV:
        monkeypatch.undo()
        one.documents.delete(ID)
        return compute(*arguments)

    monkeypatch.setattr(ChunkEncoder, "compute", delete_meanwhile)
    ask(two)
    two.drain()
    assert not one.retriever.ids()
    wait_until(lambda: not gone & stored(two))


def test_the_index_goes_and_comes_back(open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the server of the index is gone, searches and uploads are refused by name and brought texts are answered."""
    monkeypatch.setattr("cacheblend.retriever.postgres_catalog.RETRY_S", 0.0)
    with PostgresServer() as server:
        one, two = open_replicas(open_engine, tmp_path, server.new_database())
        one.ingest([FIRST])
        old = names(keys_of(two))
        ask(two)
        two.drain()
        server.stop()
        for call in (lambda: ask(two), lambda: two.ingest([OTHER])):
            with pytest.raises(IndexUnreachableError):
                call()
        assert ask(two, documents=[{"text": "brought along"}]).token_ids
        server.start()
        wait_until(lambda: one.retriever.document(ID) is not None)
        one.documents.delete(ID)
        wait_until(lambda: not old & stored(two))
        for engine in (one, two):
            engine.close()
