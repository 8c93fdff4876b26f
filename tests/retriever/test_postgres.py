"""An index that replicas share in a real PostgreSQL server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEmbedder, tiny_tokenizer
from postgres import PostgresServer

from cacheblend.base.errors import (
    ConfigError,
    DamagedDocumentError,
    DocumentChangedError,
    IndexUnreachableError,
    InputError,
    RetrieverError,
)
from cacheblend.retriever import Document, Retriever, RetrieverConfig
from cacheblend.retriever import catalog as catalog_module
from cacheblend.retriever.document import MAX_ID_BYTES
from cacheblend.retriever.index_folder import IndexedDocuments, merge_indexes

CATS = {"id": "cats", "title": "Cats", "text": "A cat sleeps on the warm roof."}
DOGS = {"id": "dogs", "title": "Dogs", "text": "A dog runs through the cold river."}
BIRDS = {"id": "birds", "title": "Birds", "text": "Birds fly over the mountain in autumn."}
ODD = {"id": "odd", "title": "zero \x00 and \x10\x00\x10\x10 0", "text": "漢字 😀 \x00\x100 \x10 and a roof"}
Open = Callable[..., Retriever]


@pytest.fixture(scope="module")
def server(postgres: PostgresServer) -> PostgresServer:
    return postgres


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.new_database()


@pytest.fixture
def replica(url: str) -> Iterator[Open]:
    """Opens a retriever on the test's database; keywords go to `RetrieverConfig`."""
    with ExitStack() as opened:

        def open_one(embedder: FakeEmbedder | None = None, **config: object) -> Retriever:
            settings = RetrieverConfig(**{"chunk_tokens": 12, "index": url, **config})  # type: ignore[arg-type]
            return opened.enter_context(Retriever(settings, tiny_tokenizer(), embedder or FakeEmbedder()))

        yield open_one


def hits(retriever: Retriever, question: str) -> list[tuple[str, int, float]]:
    return [(hit.chunk.document_id, hit.chunk.position, hit.distance) for hit in retriever.search(question, 9)]


def ids(retriever: Retriever) -> list[str]:
    return [document.id for document in retriever.documents()]


@pytest.mark.parametrize("retrieval", ["hybrid", "dense"])
def test_the_same_as_in_a_folder(replica: Open, retrieval: str) -> None:
    """Documents, chunks, places and what is found are a folder's, to the last bit, also after changes by others."""
    one, other = replica(retrieval=retrieval), replica(retrieval=retrieval)
    plain = RetrieverConfig(chunk_tokens=12, retrieval=retrieval)
    with Retriever(plain, tiny_tokenizer(), FakeEmbedder()) as folder:
        for change in (
            lambda retriever, _: retriever.add([CATS, DOGS, ODD]).added,
            lambda retriever, _: retriever.search("a cat on the roof", 2)[0].chunk,
            lambda _, second: second.add([{**CATS, "text": "Now the cat has left the roof. " * 5}, BIRDS]).replaced,
            lambda retriever, _: retriever.delete("dogs"),
        ):
            assert change(one, other) == change(folder, folder)
            for retriever in (one, other):
                for question in ("a cat on the roof", "dog river birds", "漢字 zero"):
                    assert hits(retriever, question) == hits(folder, question)
                assert retriever.chunks() == folder.chunks()
                assert [hit.place for hit in retriever.search("cat", 5)] == [hit.place for hit in folder.search("cat", 5)]
        assert ids(one) == ids(folder) == ["odd", "cats", "birds"]
        assert [each.id for each in other.documents(1, "odd")] == ["cats"]
        more = [{"id": id_, "text": "some text"} for id_ in ("a#é", "a", "A#1", "a$", "a#1", "a #1", "á#1")]
        for retriever in (one, folder):
            retriever.add(more)
            for prefix in ("", "a#", "a", "c"):
                assert retriever.ids(prefix) == [id_ for id_ in ids(retriever) if id_.startswith(prefix)]
        assert other.document("odd") is not None
        assert other.document("odd").title == ODD["title"]  # type: ignore[union-attr]


def test_what_is_large_is_read_in_parts(replica: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts and vectors are read some rows at a time, each part when the one before is taken: no statement or answer is
    large, and the server does not take a reader for one that hangs.
    """
    one = replica()
    one.add([CATS, DOGS, BIRDS, ODD])
    catalog, parts = one._catalog, list[int]()
    with catalog.snapshot():
        texts, vectors = list(catalog.texts()), catalog.vectors()
    assert len(texts) == len(vectors[0]) > 6
    read = catalog._rows

    def counted(sql: str, arguments: Sequence[object] = ()) -> list[tuple[object, ...]]:
        rows = read(sql, arguments)
        parts.append(len(rows))
        return rows

    monkeypatch.setattr(catalog_module, "_GIVEN", 3)
    monkeypatch.setattr(catalog, "_rows", counted)
    with catalog.snapshot():
        lazily = catalog.texts()
        first = next(lazily)
        assert parts == [3]
        assert [first, *lazily] == texts
        again = catalog.vectors()
        some = catalog.vectors(vectors[0][1:6])
    assert max(parts) == 3
    assert again[0] == vectors[0]
    assert (again[1] == vectors[1]).all()
    assert some[0] == vectors[0][1:6]


def test_others_changes_are_taken_over_one_by_one(replica: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another replica added and removed is read alone: no replica reads all vectors or all texts twice."""
    one, other = replica(), replica()
    one.add([CATS])
    assert hits(one, "cat roof")
    assert hits(other, "cat roof")

    def nothing(ids: object = None, read: Callable[..., object] = other._catalog.vectors) -> object:
        assert ids is not None, "everything was read again"
        return read(ids)

    monkeypatch.setattr(other._catalog, "vectors", nothing)
    monkeypatch.setattr(other._catalog, "texts", lambda ids=None, read=other._catalog.texts: nothing(ids, read))
    one.add([DOGS, BIRDS])
    assert hits(other, "dog river") == hits(one, "dog river")
    one.delete("cats")
    one.add([{**DOGS, "text": "The dog is on the roof now."}])
    other.add([CATS])
    assert hits(other, "roof cat dog") == hits(one, "roof cat dog")
    assert {id_ for id_, *_ in hits(other, "roof")} == {"dogs", "birds", "cats"}


def test_a_copy_of_the_vectors_is_brought_up_to_date(replica: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that was closed meanwhile reads its file, and what changed since; a file of another database is none."""
    replica(directory=tmp_path).add([CATS, DOGS])
    first = replica(directory=tmp_path)
    assert hits(first, "cat")
    first.close()
    other = replica()
    other.add([BIRDS])
    other.delete("dogs")
    again = replica(directory=tmp_path)
    read: list[object] = []
    monkeypatch.setattr(again._catalog, "vectors", lambda ids=None, all_=again._catalog.vectors: read.append(ids) or all_(ids))
    assert hits(again, "birds and cats") == hits(other, "birds and cats")
    assert len(read) == 1
    assert read[0] is not None
    elsewhere = replica(directory=tmp_path, index_schema="another")
    assert ids(elsewhere) == []
    elsewhere.add([ODD])
    assert {id_ for id_, *_ in hits(elsewhere, "roof")} == {"odd"}


def test_a_change_meanwhile_is_refused(replica: Open) -> None:
    """A document that another replica has changed since it was looked at is not written, nor what came with it."""
    one, other = replica(), replica()
    one.add([CATS])
    before = {id_: (one.version(id_),) for id_ in ("cats", "dogs")}
    embedded = list(one.embed([Document.of({**CATS, "text": "a third text"}), Document.of(DOGS)]))
    other.add([{**CATS, "text": "another text"}])
    with pytest.raises(DocumentChangedError, match="'cats'"):
        one.put(embedded, before)
    assert ids(one) == ["cats"]
    assert one.chunks("cats")[0].text.endswith("another text")
    other.delete("cats")
    with pytest.raises(DocumentChangedError):
        one.put([], {"cats": (Document.of(CATS).version,)})
    assert one.put(embedded, {"cats": (None,), "dogs": (None,)}) == 0
    assert ids(other) == ["cats", "dogs"]


def test_what_was_removed_is_told_by_document(replica: Open) -> None:
    """A replica learns which documents went or were replaced since it last asked; of what it cannot know, that all may be."""
    one, other = replica(), replica()
    assert one.changed_since(-1) == (0, None)
    other.add([CATS, DOGS])
    now, gone = one.changed_since(0)
    assert gone == frozenset()
    other.delete("dogs")
    other.add([{**CATS, "text": "other words"}, BIRDS])
    later, gone = one.changed_since(now)
    assert (later, gone) == (now + 3, {"cats", "dogs"})
    assert one.changed_since(later) == (later, frozenset())
    assert one.changed_since(later + 5)[1] is None


def test_writers_at_once(replica: Open) -> None:
    """Replicas that write and search at once lose nothing, and end with the same index."""
    replicas = [replica() for _ in range(3)]
    replicas[0].add([CATS])
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for at in range(8):
                retriever, id_ = replicas[number], f"{number}-{at}"
                retriever.add([{"id": id_, "text": f"text number {at} of {number}, by a writer " * 3}])
                assert retriever.search(f"number {at} of {number}", 3)
                if at % 3 == 0:
                    retriever.delete(id_)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert len({tuple(hits(each, "a writer's text")) for each in replicas}) == 1
    assert len(replicas[0].ids()) == 1 + 3 * 5
    assert {each.chunk_count for each in replicas} == {len(replicas[0].chunks())}


def test_settings_and_schemas(replica: Open) -> None:
    """An index is of one embedder and chunk size, whoever opens it; each schema is one, however long its name."""
    replica().add([CATS])
    with pytest.raises(RetrieverError, match="built with chunk_tokens '12'"):
        replica(chunk_tokens=24)
    with pytest.raises(RetrieverError, match="built with embedder 'fake'"):
        replica(embedder=FakeEmbedder(name="another"))
    long = "cacheblend_" + "tenant" * 10
    one, two = replica(index_schema=f"{long}_a"), replica(index_schema=f"{long}_b", chunk_tokens=24)
    one.add([DOGS])
    assert ids(two) == []
    assert ids(replica(index_schema=f"{long}_a")) == ["dogs"]


def test_damage_is_found_and_removed(replica: Open, url: str) -> None:
    """A row that is not what was written is an error, found by a check, and removed by a repair."""
    import psycopg

    retriever = replica()
    retriever.add([CATS, DOGS])
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE cacheblend.chunks SET text = 'bent' WHERE document_id = 'cats' AND position = 0")
    with pytest.raises(DamagedDocumentError):
        retriever.chunks("cats")
    with IndexedDocuments(Path("nowhere"), url, "cacheblend") as index:
        assert index.verify().damaged == ("cats",)
        assert index.verify(repair=True).repaired
        assert index.verify().ok
        assert index.ids() == ["dogs"]
        assert index.delete("dogs") > 0
        with pytest.raises(InputError, match="no document 'dogs'"):
            index.delete("dogs")
    assert ids(retriever) == []


def test_merging_a_folder_into_the_server(replica: Open, url: str, tmp_path: Path) -> None:
    """A folder's documents are copied with their vectors; nothing is embedded again."""
    with Retriever(RetrieverConfig(chunk_tokens=12, directory=tmp_path / "old"), tiny_tokenizer(), FakeEmbedder()) as folder:
        folder.add([CATS, ODD])
        wanted = hits(folder, "a roof")
    assert merge_indexes([tmp_path / "old"], tmp_path / "new", index=url, schema="cacheblend") == 2
    assert merge_indexes([tmp_path / "old"], tmp_path / "new", index=url, schema="cacheblend") == 0
    assert hits(replica(), "a roof") == wanted


def test_a_server_that_goes_and_comes_back() -> None:
    """While the server is gone every call is refused by name; when it is back, so is every document, without a restart."""
    with PostgresServer() as server:
        settings = RetrieverConfig(chunk_tokens=12, index=server.new_database())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cacheblend.retriever.postgres_catalog.RETRY_S", 0.0)
            with Retriever(settings, tiny_tokenizer(), FakeEmbedder()) as retriever:
                retriever.add([CATS])
                calls = (lambda: retriever.search("cat", 1), lambda: retriever.add([DOGS]), lambda: retriever.delete("cats"))
                for end in (server.stop, server.kill):
                    end()
                    for call in calls:
                        with pytest.raises(IndexUnreachableError, match="cannot be reached"):
                            call()
                    server.start()
                    assert retriever.search("cat", 1)[0].chunk.document_id == "cats"
                retriever.add([DOGS])
                server.stop()
    with pytest.raises(IndexUnreachableError, match="cannot be reached"):
        Retriever(settings, tiny_tokenizer(), FakeEmbedder())


def test_a_refusal_shows_no_secret(url: str) -> None:
    """Neither a config nor a refusal shows the URL's password."""
    secret = "hunter2"
    for bad in (f"mysql://me:{secret}@host/x", f"postgresql://me:{secret}@host/x?no=1", f"postgresql://me:%{secret}@host/x"):
        with pytest.raises(ConfigError) as refused:
            Retriever(RetrieverConfig(index=bad), tiny_tokenizer(), FakeEmbedder())
        assert secret not in str(refused.value)
    config = RetrieverConfig(index=url.replace("cacheblend@", f"nobody:{secret}@"))
    assert secret not in repr(config)
    with pytest.raises(RetrieverError) as refused_too:
        Retriever(config, tiny_tokenizer(), FakeEmbedder())
    assert secret not in str(refused_too.value)


def test_vectors_of_other_lengths_are_refused(replica: Open) -> None:
    """A batch is written whole or not at all: with vectors of another length, nothing of it is."""
    retriever = replica()
    retriever.add([CATS])
    wrong = list(retriever.embed([Document.of(DOGS)]))
    with pytest.raises(RetrieverError, match="built with dimensions"):
        retriever._catalog.put([(one.document, one.chunks, np.zeros((len(one.chunks), 3), np.float32)) for one in wrong])
    assert ids(retriever) == ["cats"]


def test_what_the_server_cannot_hold(replica: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest id that is allowed is taken; one above the server's own limit is the caller's fault, not an outage."""
    letters = np.random.default_rng(0).integers(0x4E00, 0x9000, MAX_ID_BYTES)  # which cannot be compressed
    id_ = "".join(map(chr, letters))
    retriever = replica()
    longest = {**CATS, "id": id_[: MAX_ID_BYTES // 3]}
    retriever.add([longest])
    assert ids(retriever) == [longest["id"]]
    monkeypatch.setattr("cacheblend.retriever.document.MAX_ID_BYTES", 10**6)
    with pytest.raises(InputError, match="cannot hold this"):
        retriever.add([{**DOGS, "id": id_}])
    assert ids(retriever) == [longest["id"]]
