"""Metadata of documents: stored with them, filtered by, and refused where they are more than plain values."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import DamagedDocumentError, InputError
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.metadata import MAX_BYTES

FIELDS: dict[str, dict[str, Any]] = {
    "old": {"year": 1999, "lang": "de", "draft": True},
    "new": {"year": 2024.5, "lang": ["en", "fr"], "a.b c": "x"},
    "text": {"year": "2024", "lang": "fr", "draft": False},
    "bare": {},
}


def open_index(directory: Path) -> Retriever:
    return Retriever(RetrieverConfig(directory=directory), tiny_tokenizer(), FakeEmbedder())


@pytest.fixture
def retriever(tmp_path: Path) -> Iterator[Retriever]:
    with open_index(tmp_path / "index") as retriever:
        retriever.add({"id": id_, "text": f"A cat sleeps, says {id_}.", "metadata": fields} for id_, fields in FIELDS.items())
        yield retriever


def found(retriever: Retriever, wanted: Any, num_chunks: int = 9) -> list[str]:
    return sorted(one.chunk.document_id for one in retriever.search("Who sleeps?", num_chunks, wanted))


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (None, ["bare", "new", "old", "text"]),
        ({}, ["bare", "new", "old", "text"]),
        ({"lang": "fr"}, ["new", "text"]),
        ({"lang": ["de", "en"]}, ["new", "old"]),
        ({"year": {"gte": 2000}}, ["new"]),
        ({"year": {"gt": 1999, "lte": 2024.5}}, ["new"]),
        ({"year": {"gte": "2000"}}, ["text"]),
        ({"year": 1999, "lang": "de"}, ["old"]),
        ({"year": 1999, "lang": "fr"}, []),
        ({"draft": True}, ["old"]),
        ({"draft": 1}, []),
        ({"a.b c": "x"}, ["new"]),
        ({"none": "x"}, []),
        ({"lang": "' OR 1=1 --"}, []),
    ],
)
def test_filters(retriever: Retriever, wanted: Any, ids: list[str]) -> None:
    """Only documents that meet all conditions are found, and all of them; each comes with its metadata."""
    assert found(retriever, wanted) == ids
    assert len(found(retriever, wanted, 1)) == min(1, len(ids))
    assert {one.chunk.document_id: one.metadata for one in retriever.search("Who sleeps?", 9, wanted)} == {
        id_: FIELDS[id_] for id_ in ids
    }


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"year": {"like": 2}}, "year: 'like' is no operator; give gt, gte, lt, lte, a value, or a list of values"),
        ({"year": {}}, "year: has no operator"),
        ({"year": {"gte": [1]}}, "year: .* is no plain value"),
        ({"year": []}, "year: has 0 values"),
        ({"year": [0] * 101}, "year: has 101 values; give 1 to 100"),
        ({"year": [[1]]}, "is no plain value"),
        ({"year": None}, "is no plain value"),
        ({"year": float("nan")}, "is no plain value"),
        ({"year": 2**63}, "is no plain value"),
        ({"year": 10**400}, "is no plain value"),
        ({"year": "\ud800"}, "is no plain value"),
        ({'a"b': 1}, "is no name of a field"),
        ({str(number): 1 for number in range(65)}, "at most 64 fields"),
        ([], None),
        (["year"], "must be an object"),
    ],
)
def test_bad_filters(retriever: Retriever, wanted: Any, message: str | None) -> None:
    """A filter that cannot be read names the field and what is allowed; an empty one is none."""
    if message is None:
        assert len(found(retriever, wanted)) == len(FIELDS)
        return
    with pytest.raises(InputError, match=message):
        retriever.search("Who sleeps?", 1, wanted)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": {"b": 1}}, "document 'x': a: .* is no plain value; give text, a number, true, false, or a list"),
        ({"a": [[1]]}, "is no plain value"),
        ({"a": np.arange(2)}, "is no plain value"),
        ({"a": ["x" * 60] * 100}, f"metadata of .* is more than {MAX_BYTES}"),
        ({"a": [0] * 101}, "has 101 values"),
        ({"a": "x" * MAX_BYTES}, f"is more than {MAX_BYTES}; put what is long into the text"),
        ({"": 1}, "is no name of a field"),
        ({1: 1}, "is no name of a field"),
        ({str(number): 1 for number in range(65)}, "at most 64 fields"),
        ("year=2024", "must be an object"),
    ],
)
def test_bad_metadata(retriever: Retriever, metadata: Any, message: str) -> None:
    """Metadata that are nested, or too much, are refused before anything of the document is stored."""
    with pytest.raises(InputError, match=message):
        retriever.add([{"id": "x", "text": "words", "metadata": metadata}])
    assert retriever.version("x") is None


def test_metadata_change_go_and_are_checked(retriever: Retriever, tmp_path: Path) -> None:
    """Other metadata of the same text replace it; they go with the document; damage is an error that names it, and mended."""
    document = {"id": "old", "text": "A cat sleeps, says old.", "metadata": {"lang": "fr", "none": None}}
    assert retriever.add([document])
    assert not retriever.changed([document])
    assert (retriever.metadata("old"), found(retriever, {"lang": "de"})) == ({"lang": "fr"}, [])
    retriever.delete("new")
    assert found(retriever, {"lang": "fr"}) == ["old", "text"]
    with sqlite3.connect(tmp_path / "index" / "catalogue.sqlite") as file:
        assert file.execute("SELECT count(*) FROM metadata").fetchone() == (2,)
        file.execute('UPDATE metadata SET fields = \'{"lang": "fr", "year": 1}\' WHERE document_id = \'old\'')
    with pytest.raises(DamagedDocumentError, match="'old'"):
        retriever.search("Who sleeps?", 9)
    assert retriever.verify().damaged == ("old",)
    assert retriever.add([document])
    assert retriever.verify().ok


def test_an_index_of_before(tmp_path: Path) -> None:
    """An index that was made before there were metadata is opened, and has some from then on."""
    with open_index(tmp_path) as retriever:
        retriever.add([{"id": "a", "text": "A cat sleeps."}])
    with sqlite3.connect(tmp_path / "catalogue.sqlite") as file:
        file.execute("DROP TABLE metadata")
    with open_index(tmp_path) as retriever:
        assert found(retriever, None) == ["a"]
        retriever.add([{"id": "b", "text": "A dog sleeps.", "metadata": {"lang": "de"}}])
        assert found(retriever, {"lang": "de"}) == ["b"]
