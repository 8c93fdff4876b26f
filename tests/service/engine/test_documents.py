"""Documents are listed, replaced and deleted together with their chunks' KV."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import DOCUMENTS, QUESTION, TOP_K, OpenEngine, furthest, key_of

from cacheblend.base.errors import DocumentChangedError, InputError, StoreFullError
from cacheblend.base.sqlite import Database
from cacheblend.retriever import Document, Retriever
from cacheblend.retriever.catalog import Catalog as IndexCatalog
from cacheblend.retriever.index import INDEX_FILE, IndexedDocuments
from cacheblend.service import Engine
from cacheblend.service.engine.documents import Documents
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig

FIRST, *OTHERS = DOCUMENTS
ID = str(FIRST["id"])


def keys_of(engine: Engine, id_: str) -> set[ChunkKey]:
    return {key_of(engine, chunk) for chunk in engine.retriever.chunks(id_)}


def stored(engine: Engine) -> set[ChunkKey]:
    return {entry.key for entry in engine.store.ls()}


def paged(documents: Documents, limit: int = 1, after: str | None = None, **options: bool) -> list[str]:
    """The ids of all pages of a listing, one page after the other; each document is listed as it is shown."""
    found, has_more = list[str](), True
    while has_more:
        page, has_more = documents.page(limit, after, **options)
        assert 0 < len(page) <= limit
        assert page == [documents.status(one.id) for one in page]
        found += [one.id for one in page]
        after = found[-1]
    return found


def test_ls_and_show(engine: Engine) -> None:
    """Every document is listed in the order of adding, with its chunks and what of their KV is stored."""
    engine.ingest(DOCUMENTS)
    statuses = engine.documents.page()[0]
    assert [status.id for status in statuses] == [document["id"] for document in DOCUMENTS]
    for status in statuses:
        keys = keys_of(engine, status.id)
        assert (status.stored_chunks, status.shared_chunks) == (len(keys), 0)
        assert status.own_bytes == status.stored_bytes == sum(entry.bytes for entry in engine.store.ls() if entry.key in keys)
    status, chunks = engine.documents.show(ID)
    assert status == statuses[0]
    assert "".join(chunk.text for chunk, _ in chunks).endswith(str(FIRST["text"])[-20:])


def test_the_parts_of_a_file_are_one(engine: Engine) -> None:
    """A file's pages are one row, in the place of the first, and its name shows and deletes all of them."""
    pages = [
        {"id": f"f/report.pdf#page={page}", "title": f"report, page {page}", "text": f"page {page}"} for page in ("10", "2-3")
    ]
    engine.ingest([pages[0], {"id": "note", "text": "between"}, pages[1], {"id": "f/report.pdf.txt", "text": "another"}])
    documents = engine.documents
    files, has_more = documents.page(by_file=True)
    names = [document["id"] for document in DOCUMENTS] + ["f/report.pdf", "note", "f/report.pdf.txt"]
    assert ([file.id for file in files], has_more) == (names, False)
    file = files[-3]
    assert (file.title, file.parts) == ("report.pdf", 2)
    assert file.stored_bytes == sum(documents.status(str(page["id"])).stored_bytes for page in pages) > 0
    paged, has_more = documents.page(1, names[-4], by_file=True)
    assert (paged, has_more) == ([file], True)
    assert [status.id for status in documents.page(by_file=True, after="f/report.pdf")[0]] == names[-2:]
    status, chunks = documents.show("f/report.pdf")
    assert (status, [chunk.document_id for chunk, _ in chunks]) == (file, [page["id"] for page in reversed(pages)])
    assert documents.delete("f/report.pdf") == file
    assert [status.id for status in documents.page()[0]] == [name for name in names if name != "f/report.pdf"]
    with pytest.raises(InputError, match="there is no such document"):
        documents.page(by_file=True, after="f/report.pdf")


def test_a_page_of_files_reads_no_other_documents(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a listing is right, and costs no look at documents beyond it, however many parts files have and wherever."""
    ids = [f"{name}#page={page}" for page in (1, 2, 3) for name in ("a.pdf", "b.pdf")] + ["c"]
    engine.ingest([{"id": id_, "text": f"the text of {id_}"} for id_ in ids])
    engine.ingest([{"id": "a.pdf#page=1", "text": "another first page, which is the last document now"}])
    documents = engine.documents
    names = paged(documents, after=ID, by_file=True)
    assert names == [*(str(document["id"]) for document in DOCUMENTS[1:]), "b.pdf", "a.pdf", "c"]
    looked_at = list[str]()
    version = engine.retriever.version
    monkeypatch.setattr(engine.retriever, "version", lambda id_: (looked_at.append(id_), version(id_))[1])
    assert [file.id for file in documents.page(1, ID, by_file=True)[0]] == names[:1]
    assert set(looked_at) <= {ID, *names[:2]}


def test_files_that_the_store_alone_knows(engine: Engine) -> None:
    """Pages that a cut-off deletion left in the store alone are listed with their file, or as one after the index's own."""
    engine.ingest([{"id": f"{name}#page={page}", "text": f"{name} {page}"} for name in ("a.pdf", "b.pdf") for page in (1, 2)])
    for id_ in ("a.pdf#page=1", "a.pdf#page=2", "b.pdf#page=2"):
        engine.retriever.delete(id_)
    files = engine.documents.page(by_file=True)[0]
    assert [(file.id, file.parts) for file in files[-2:]] == [("b.pdf", 2), ("a.pdf", 2)]
    assert engine.documents.page(by_file=True, after="b.pdf") == ([files[-1]], False)
    assert engine.documents.page(by_file=True, after="a.pdf") == ([], False)


def test_the_newest_first(engine: Engine) -> None:
    """In the reverse of the order of adding every file is listed once, page by page, and what was replaced is new."""
    names = [document["id"] for document in DOCUMENTS]
    for id_ in ("a.pdf#page=1", "b", "a.pdf#page=2", names[0]):
        engine.ingest([{"id": id_, "title": "", "text": f"words of {id_} once more"}])
    expected = [names[0], "a.pdf", "b", *reversed(names[1:])]
    assert [status.id for status in engine.documents.page(by_file=True, newest_first=True)[0]] == expected
    assert paged(engine.documents, by_file=True, newest_first=True) == expected
    page, _ = engine.documents.page(3, newest_first=True)
    assert [status.id for status in page] == [names[0], "a.pdf#page=2", "b"]


def test_a_documents_own_name_is_no_files(engine: Engine) -> None:
    """Where a document has the name of a file itself, the name means that document alone."""
    engine.ingest([{"id": "a", "text": "itself"}, {"id": "a#page=1", "text": "its page"}])
    assert [status.id for status in engine.documents.page(by_file=True)[0]][-2:] == ["a", "a#page=1"]
    engine.documents.delete("a")
    assert [(status.id, status.parts) for status in engine.documents.page(by_file=True)[0]][-1] == ("a", 1)
    assert engine.documents.status("a").chunks == engine.documents.status("a#page=1").chunks


def test_deletions_do_not_come_between_an_ingests_halves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that is deleted while it is replaced is there with its new text, or gone from index and store."""
    put, deletions = engine.retriever.put, list[threading.Thread]()

    def delete_meanwhile(*arguments: Any) -> int:
        if not deletions:
            deletions.append(threading.Thread(target=engine.documents.delete, args=(ID,)))
            deletions[0].start()
            deletions[0].join(0.3)
        return put(*arguments)

    monkeypatch.setattr(engine.retriever, "put", delete_meanwhile)
    engine.ingest([{"id": ID, "text": "other words"}])
    deletions[0].join()
    assert ID not in [status.id for status in engine.documents.page()[0]]
    assert engine.store.documents.get(ID) is None


def while_computing(engine: Engine, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], chunk: int = 0) -> None:
    """Have something happen once while an ingest computes, when the chunks before this one are written."""
    precompute_documents = engine.fusor.precompute_documents

    def slow(*arguments: Any, **options: Any) -> Iterator[ChunkKV]:
        for number, kv in enumerate(precompute_documents(*arguments, **options)):
            if number == chunk:
                monkeypatch.undo()
                engine.store.flush()
                act()
            yield kv

    monkeypatch.setattr(engine.fusor, "precompute_documents", slow)


def test_a_deletion_takes_no_chunk_of_a_document_on_its_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV that an ingest found stored, and that goes with another document before it ends, is computed then."""
    while_computing(engine, monkeypatch, lambda: engine.documents.delete(ID))
    report = engine.ingest([{**FIRST, "id": "twin"}, {"id": "new", "text": "words of its own"}])
    assert [status.id for status in engine.documents.page()[0]][-2:] == ["twin", "new"]
    assert keys_of(engine, "twin") <= stored(engine)
    assert report.evicted == 0
    for ingest in (engine.ingest, engine.ingest_stream):  # and KV that goes with another's upload of the text
        while_computing(engine, monkeypatch, lambda: engine.store.documents.drop_unowned(stored(engine)), 1)
        ingest([{"id": "long", "text": f"{ingest.__name__} has words that an upload that was given up had computed " * 2}])
        assert keys_of(engine, "long") <= stored(engine)


def test_an_unchanged_document_that_is_deleted_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that an ingest found unchanged, and that is deleted before it ends, stays deleted; nothing else comes."""
    others = stored(engine) - keys_of(engine, ID)
    while_computing(engine, monkeypatch, lambda: engine.documents.delete(ID))
    with pytest.raises(DocumentChangedError, match=ID):
        engine.ingest([FIRST, {"id": "new", "text": "words of its own"}])
    assert not {ID, "new"} & {status.id for status in engine.documents.page()[0]}
    assert stored(engine) == others


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


def test_shared_chunks_are_stored_once(open_engine: OpenEngine) -> None:
    """A chunk of two documents is counted in both, stored once, and goes with the last of them."""
    engine = open_engine()
    engine.ingest([{"id": "one", "text": "the same words"}, {"id": "two", "text": "the same words"}])
    one, two = engine.documents.page()[0]
    assert one.shared_chunks == two.shared_chunks == 1
    assert (one.stored_bytes, one.own_bytes) == (engine.store.stats().nvme.bytes, 0)
    engine.documents.delete("one")
    assert engine.store.stats().nvme.entries == 1
    (two,) = engine.documents.page()[0]
    assert two.own_bytes == two.stored_bytes
    engine.documents.delete("two")
    assert engine.store.stats().nvme.entries == 0


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.5), ("int4", 8.0)])
def test_codecs(open_ingested: OpenEngine, codec: str, most: float) -> None:
    """KV of another codec is ingested beside, takes less room, and blends to nearly the same logits."""
    with open_ingested() as engine:
        engine.ingest(DOCUMENTS)
        raw, raw_bytes = engine.answer(QUESTION, num_chunks=TOP_K), engine.store.stats().nvme.bytes
    with open_ingested(kv_cache_dtype=codec) as engine:
        report = engine.ingest(DOCUMENTS)
        assert (report.unchanged, report.computed) == (len(DOCUMENTS), report.chunks)
        small_bytes = engine.store.stats().nvme.bytes - raw_bytes
        assert small_bytes < 0.75 * raw_bytes  # headers are as large as before
        answer = engine.answer(QUESTION, num_chunks=TOP_K)
        assert (answer.plan.hits, answer.plan.misses) == (TOP_K, 0)
        assert 0 < furthest(answer, raw) < most
        status = engine.documents.show(ID)[0]
        assert status.stored_chunks == 2 * len(keys_of(engine, ID))
        engine.documents.delete(ID)
        assert engine.store.stats().nvme.entries == 2 * sum(len(keys_of(engine, str(document["id"]))) for document in OTHERS)


@contextmanager
def other_process(engine: Engine) -> Iterator[Documents]:
    """The documents of an engine's folder as another process, such as the command line, has them open."""
    folder = Path(engine.config.store_dir)
    with (
        KVStore(StoreConfig(directory=folder / "kv", ram_budget_bytes=1)) as store,
        IndexedDocuments.open(folder / "index") as index,
    ):
        yield Documents(store, index)


def entries_of(engine: Engine) -> list[Path]:
    return [path for path in (Path(engine.config.store_dir) / "kv" / "entries").rglob("*") if path.is_file()]


@pytest.mark.parametrize("where", ["here", "in another process"])
@pytest.mark.parametrize("change", ["delete", "replace"])
def test_changed_while_its_upload_computes(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, where: str, change: str
) -> None:
    """An upload whose document is deleted or replaced meanwhile is told so, and leaves no row, file or text of it."""
    engine = open_engine()
    other = open_engine()
    engine.ingest([{"id": ID, "text": "what was there before"}])

    def act() -> None:
        if change == "replace":
            (engine if where == "here" else other).ingest([{"id": ID, "text": "quite other words"}])
        elif where == "here":
            engine.documents.delete(ID)
        else:
            with other_process(engine) as documents:
                documents.delete(ID)

    while_computing(engine, monkeypatch, act, chunk=1)
    with pytest.raises(DocumentChangedError, match="'for' was deleted or replaced"):
        engine.ingest([FIRST])
    engine.store.flush()
    left = {} if change == "delete" else {ID: keys_of(engine, ID)}
    assert {status.id for status in engine.documents.page()[0]} == set(left)
    assert stored(engine) == {key for keys in left.values() for key in keys}
    assert len(entries_of(engine)) == len(stored(engine))
    assert engine.store.verify().ok
    assert engine.ingest([FIRST]).evicted == 0


def full_until(store_has_room: Callable[[], bool], reserved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no commit of the store find room until something is freed, and none of the index while a folder has its reserve."""
    transaction, write = Database.transaction, IndexCatalog._write

    @contextmanager
    def of_store(database: Database) -> Iterator[object]:
        with transaction(database) as connection:
            yield connection
            if not store_has_room():
                raise StoreFullError("no room")

    @contextmanager
    def of_index(catalog: IndexCatalog) -> Iterator[None]:
        with write(catalog):
            yield
            if (reserved / "reserve").exists():
                raise StoreFullError("no room")

    monkeypatch.setattr(Database, "transaction", of_store)
    monkeypatch.setattr(IndexCatalog, "_write", of_index)


@pytest.mark.parametrize("freed", ["the reserve", "the files"])
def test_deleting_on_a_full_disk(engine: Engine, monkeypatch: pytest.MonkeyPatch, freed: str) -> None:
    """On a full disk a document is deleted all the same: the reserve makes room, or its own files, which go first then."""
    keys, folder = keys_of(engine, ID), Path(engine.config.store_dir)
    files = [folder / "kv" / "entries" / str(key)[:2] / str(key) for key in keys]
    reserves = [folder / "kv" / "reserve", folder / "index" / "reserve"]
    assert all(reserve.stat().st_size >= 256 * 1024 for reserve in reserves)
    with monkeypatch.context() as patch:
        if freed == "the reserve":
            full_until(lambda: not reserves[0].exists(), folder / "index", patch)
        else:
            full_until(lambda: not any(file.exists() for file in files), folder / "index", patch)
        engine.documents.delete(ID)
    assert not keys & stored(engine)
    assert ID not in [status.id for status in engine.documents.page()[0]]
    assert engine.retriever.search(QUESTION, 1)
    assert engine.store.verify().ok
    assert all(reserve.exists() for reserve in reserves)  # taken again as soon as there is room


def test_adding_on_a_full_disk_takes_no_reserve(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reserved for removals is not used up by uploads."""
    index = Path(engine.config.store_dir) / "index"
    with monkeypatch.context() as patch:
        full_until(lambda: True, index, patch)
        with pytest.raises(StoreFullError):
            engine.ingest([{"id": "new", "text": "no room for this"}])
    assert (index / "reserve").exists()
    assert engine.retriever.document("new") is None


def test_pages(engine: Engine) -> None:
    """Pages follow one another in the order of `ls`, the documents that the store alone knows at the end."""
    engine.store.documents.put([("lost-b", "1", []), ("lost-a", "1", [])])
    every = [status.id for status in engine.documents.page()[0]]
    assert every == [*(document["id"] for document in DOCUMENTS), "lost-a", "lost-b"]
    for limit in (1, 2, 3, 6, 7, 100):
        assert paged(engine.documents, limit) == every
    assert engine.documents.page(5, "lost-b") == ([], False)
    engine.ingest([{**FIRST, "text": "it goes to the end"}])
    assert engine.documents.page(1)[0][0].id == DOCUMENTS[1]["id"]
    with pytest.raises(InputError, match="begin again with the first page"):
        engine.documents.page(1, "nothing")


def test_documents_of_a_vllm(engine: Engine) -> None:
    """Documents of a vLLM that came later are listed and deleted, also where the store does not know them, as after a kill."""
    ids = ["v", "v.pdf#page=1", "v.pdf#page=2"]
    engine.config.vllm_dir.mkdir()
    with IndexedDocuments(IndexCatalog(engine.config.vllm_dir / INDEX_FILE, {})) as index:
        index.put(list(engine.retriever.embed([Document(id_, "", f"words of {id_}") for id_ in ids])))
        assert paged(engine.documents)[len(DOCUMENTS) :] == ids
        assert paged(engine.documents, by_file=True)[len(DOCUMENTS) :] == ["v", "v.pdf"]
        for name in ("v", "v.pdf"):
            engine.documents.delete(name)
        assert index.ids() == []


def test_one_document_is_looked_up_by_its_id(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Showing and deleting one document lists no others."""

    def listing(*_: object) -> None:
        raise AssertionError("all documents were listed")

    monkeypatch.setattr(IndexCatalog, "documents", listing)
    assert engine.documents.show(ID)[1]
    engine.documents.delete(ID)
    assert engine.store.documents.get(ID) is None
