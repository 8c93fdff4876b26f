"""Two versions of cacheblend never share an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import RetrieverError
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.index import IndexedDocuments

DOCUMENT = {"id": "1", "text": "some words"}
REFUSED = r"catalogue\.sqlite has format 3, this version of cacheblend reads 2; use the version that made it, or another dir"


def open_index(directory: Path) -> Retriever:
    return Retriever(RetrieverConfig(directory=directory, chunk_tokens=16), tiny_tokenizer(), FakeEmbedder())


def to_format_3(directory: Path) -> None:
    with sqlite3.connect(directory / "catalogue.sqlite") as later:
        later.execute("UPDATE meta SET value = '3' WHERE key = 'format'")
        later.execute("ALTER TABLE chunks RENAME TO pieces")
    later.close()


def content(directory: Path) -> list[str]:
    """The whole file as SQL."""
    file = sqlite3.connect(directory / "catalogue.sqlite")
    lines = list(file.iterdump())
    file.close()
    return lines


@pytest.mark.parametrize("documents", [[], [DOCUMENT]])
@pytest.mark.parametrize("use", [open_index, IndexedDocuments.open], ids=["open", "look"])
def test_an_index_of_another_format(tmp_path: Path, documents: list[dict[str, str]], use: Callable[[Path], object]) -> None:
    """An index of a later format, with documents or without, is refused with what to do, and left as it is."""
    with open_index(tmp_path / "index") as index:
        if documents:
            index.add(documents)
    to_format_3(tmp_path / "index")
    before = content(tmp_path / "index")
    with pytest.raises(RetrieverError, match=REFUSED):
        use(tmp_path / "index")
    assert content(tmp_path / "index") == before


def test_a_format_that_changes_under_an_open_index(tmp_path: Path) -> None:
    """A process that has the index open while another version takes it over adds nothing to it any more."""
    with open_index(tmp_path) as index:
        index.add([DOCUMENT])
        with sqlite3.connect(tmp_path / "catalogue.sqlite") as later:
            later.execute("UPDATE meta SET value = '3' WHERE key = 'format'")
        later.close()
        with pytest.raises(RetrieverError, match=REFUSED):
            index.add([{"id": "2", "text": "other words"}])
