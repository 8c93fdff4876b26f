"""The index's file: damage is found and named, and mended by ingesting again; another version's is left as it is."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import DamagedDocumentError, RetrieverError, StoreFullError
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.catalog import Catalog
from cacheblend.retriever.index import IndexedDocuments

DOCUMENTS = [
    {"id": "cats", "title": "Cats", "text": "A cat sleeps on the warm roof. " * 3},
    {"id": "dogs", "title": "Dogs", "text": "A dog runs through the cold river. " * 3},
]
REFUSED = r"catalogue\.sqlite has format 9, and this version reads 3; use the version that made it, or another dir"
DAMAGES = {
    "text": "UPDATE chunks SET text = 'A cat sleeps on the warm proof. ' WHERE document_id = 'cats' AND position = 1",
    "no text": "UPDATE chunks SET text = CAST(x'ff' || CAST(text AS BLOB) AS TEXT) WHERE document_id = 'cats' AND position = 1",
    "token ids": "UPDATE chunks SET token_ids = zeroblob(length(token_ids)) WHERE document_id = 'cats' AND position = 1",
    "torn ids": "UPDATE chunks SET token_ids = x'010203' WHERE document_id = 'cats' AND position = 1",
    "vector": "UPDATE chunks SET vector = zeroblob(length(vector)) WHERE document_id = 'cats' AND position = 1",
    "torn vector": "UPDATE chunks SET vector = x'00' WHERE document_id = 'cats' AND position = 1",
    "checksum": "UPDATE chunks SET checksum = x'' WHERE document_id = 'cats' AND position = 1",
    "kind": "UPDATE chunks SET text = x'41' WHERE document_id = 'cats' AND position = 1",
    "missing": "DELETE FROM chunks WHERE document_id = 'cats' AND position = 1",
    "all missing": "DELETE FROM chunks WHERE document_id = 'cats'",
    "moved": "UPDATE chunks SET document_id = 'dots' WHERE document_id = 'cats' AND position = 1",
    "title": "UPDATE documents SET title = 'Cuts' WHERE id = 'cats'",
    "version": "UPDATE documents SET version = 'f' || substr(version, 2) WHERE id = 'cats'",
}


def open_index(directory: Path) -> Retriever:
    return Retriever(RetrieverConfig(directory=directory, chunk_tokens=12), tiny_tokenizer(), FakeEmbedder())


def alter(directory: Path, statement: str) -> None:
    with sqlite3.connect(directory / "catalogue.sqlite") as catalog:
        catalog.execute(statement)
    catalog.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder of an index with two documents of several chunks each."""
    with open_index(tmp_path / "index") as index:
        index.add(DOCUMENTS)
        assert min(document.chunks for document in index.documents()) > 1
    return tmp_path / "index"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_until_the_document_is_added_again(directory: Path, damage: str) -> None:
    """Showing it and finding it raise an error that names the document; the others are found; adding it again mends it."""
    with open_index(directory) as index:
        whole = index.chunks("cats"), index.chunks("dogs")
    alter(directory, DAMAGES[damage])
    with open_index(directory) as index:
        with pytest.raises(DamagedDocumentError, match=r"'cats' is damaged.*ingest it again"):
            index.chunks("cats")
        assert index.chunks("dogs") == whole[1]
        assert index.search("the dog runs through the cold river", 1)[0].chunk in whole[1]
        try:
            found = index.search("the cat sleeps on the warm roof", 3)
        except DamagedDocumentError as error:
            named = error.document_id
        else:
            named = "cats"
            assert all(scored.chunk in [*whole[0], *whole[1]] for scored in found)
        assert named == "cats"
        index.add(DOCUMENTS)
        assert index.chunks("cats") == whole[0]
        assert {scored.chunk.document_id for scored in index.search("the cat sleeps on the warm roof", 2)} == {"cats"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify(directory: Path, damage: str) -> None:
    """`verify` names the damaged documents, and with `repair` takes them out, so that the others can be asked about."""
    alter(directory, DAMAGES[damage])
    with IndexedDocuments.open(directory) as index:
        report = index.verify()
        assert (report.documents, report.damaged, report.ok, report.repaired) == (2, ("cats",), False, False)
        assert report.strays == (damage == "moved")
        assert index.verify(repair=True).damaged == ("cats",)
        report = index.verify()
        assert (report.documents, report.ok) == (1, True)
    with open_index(directory) as index:
        assert index.search("the cat sleeps on the warm roof", 1)[0].chunk.document_id == "dogs"


@pytest.mark.parametrize("repair", [False, True])
def test_verify_beside_a_service(directory: Path, monkeypatch: pytest.MonkeyPatch, repair: bool) -> None:
    """A document that another process deletes meanwhile is not damaged; the one that has its row number then stays."""
    is_intact = Catalog.is_intact
    with open_index(directory) as service, IndexedDocuments.open(directory) as index:

        def meanwhile(catalog: Catalog, id_: str) -> bool:
            if id_ == "dogs" and service.version("dogs"):
                service.delete("dogs")
                service.add([{"id": "birds", "text": "A bird sings in the old tree."}])
            return is_intact(catalog, id_)

        monkeypatch.setattr(Catalog, "is_intact", meanwhile)
        assert index.verify(repair=repair).damaged == ()
        assert service.ids() == ["cats", "birds"]


def test_a_list_tells_what_is_damaged(directory: Path) -> None:
    """A list goes on over a damaged row, without what it says."""
    alter(directory, DAMAGES["title"])
    with IndexedDocuments.open(directory) as index:
        cats, dogs = index.documents()
        assert (cats.id, cats.title, cats.damaged) == ("cats", "", True)
        assert (dogs.title, dogs.damaged) == ("Dogs", False)
        assert index.document("cats") == cats


def test_a_lookup_table_that_does_not_fit(directory: Path) -> None:
    """Entries that SQLite's own index lacks are found by `verify`, and made again."""
    with sqlite3.connect(directory / "catalogue.sqlite") as catalog:
        catalog.execute("PRAGMA writable_schema = ON")
        [[page]] = catalog.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_chunks_1'")
        [[size]] = catalog.execute("PRAGMA page_size")
    catalog.close()
    with (directory / "catalogue.sqlite").open("r+b") as file:
        file.seek((page - 1) * size + 3)
        cells = int.from_bytes(file.read(2), "big")
        file.seek((page - 1) * size + 3)
        file.write((cells - 1).to_bytes(2, "big"))  # the last entry is not seen any more
    with IndexedDocuments.open(directory) as index:
        assert index.verify().broken
        assert index.verify(repair=True).damaged == ()
        assert index.verify().ok


@pytest.mark.parametrize(
    ("key", "value"), [("generation", "1x"), ("dimensions", "6x"), ("dimensions", "-4"), ("dimensions", "65")]
)
def test_damaged_numbers(directory: Path, key: str, value: str) -> None:
    """A damaged number of the file is an error with what to do."""
    alter(directory, f"UPDATE meta SET value = '{value}' WHERE key = '{key}'")
    with pytest.raises(RetrieverError, match=r"is damaged.*another directory"), open_index(directory) as index:
        index.search("the cat sleeps on the warm roof", 1)


def test_a_full_disk(directory: Path) -> None:
    """A disk without room for the index is named as that, and not as an index that cannot be used."""
    with open_index(directory) as index:
        index._catalog._db.execute("PRAGMA max_page_count = 1")  # SQLite's own error for want of pages
        with pytest.raises(StoreFullError, match=r"no room on the disk.*free space"):
            index.add([{"id": "more", "text": "words " * 2000}])
        assert index.document("more") is None


def test_a_name_that_is_no_text(directory: Path) -> None:
    """Damage in SQLite's own schema, whose message is no text either, is an error with what to do."""
    path = directory / "catalogue.sqlite"
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE documents", b"CREATE TABLE \xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff"))
    with pytest.raises(RetrieverError, match="another directory"):
        open_index(directory)


TO_FORMAT_9 = "UPDATE meta SET value = '9' WHERE key = 'format'"


def content(directory: Path) -> list[str]:
    """The whole file as SQL."""
    file = sqlite3.connect(directory / "catalogue.sqlite")
    lines = list(file.iterdump())
    file.close()
    return lines


@pytest.mark.parametrize("documents", [[], DOCUMENTS])
@pytest.mark.parametrize("use", [open_index, IndexedDocuments.open], ids=["open", "look"])
def test_an_index_of_another_format(tmp_path: Path, documents: list[dict[str, str]], use: Callable[[Path], object]) -> None:
    """An index of a later format, with documents or without, is refused with what to do, and left as it is."""
    with open_index(tmp_path / "index") as index:
        if documents:
            index.add(documents)
    alter(tmp_path / "index", TO_FORMAT_9)
    alter(tmp_path / "index", "ALTER TABLE chunks RENAME TO pieces")
    before = content(tmp_path / "index")
    with pytest.raises(RetrieverError, match=REFUSED):
        use(tmp_path / "index")
    assert content(tmp_path / "index") == before


def test_a_format_that_changes_under_an_open_index(tmp_path: Path) -> None:
    """A process that has the index open while another version takes it over adds nothing to it any more."""
    with open_index(tmp_path) as index:
        index.add(DOCUMENTS[:1])
        alter(tmp_path, TO_FORMAT_9)
        with pytest.raises(RetrieverError, match=REFUSED):
            index.add(DOCUMENTS)
