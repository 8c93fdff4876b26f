"""Indexes are merged: chunks, vectors and settings as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FakeEmbedder, tiny_tokenizer

from cacheblend.base.errors import RetrieverError
from cacheblend.retriever import Retriever, RetrieverConfig
from cacheblend.retriever.index_folder import merge_indexes

DOCUMENTS = [{"id": str(number), "text": f"words of number {number} " * 20} for number in range(5)]


def open_index(directory: Path, *, chunk_tokens: int = 16) -> Retriever:
    return Retriever(RetrieverConfig(directory=directory, chunk_tokens=chunk_tokens), tiny_tokenizer(), FakeEmbedder())


def make_index(directory: Path, documents: list[dict[str, str]]) -> Path:
    with open_index(directory) as index:
        index.add(documents)
    return directory


def test_merged_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found in a merged index is what is found in an index of all documents; nothing is embedded for it."""
    one, two = make_index(tmp_path / "one", DOCUMENTS[:3]), make_index(tmp_path / "two", DOCUMENTS[2:])
    steps: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(FakeEmbedder, "encode", None)
        assert merge_indexes([one, two], tmp_path / "all", on_progress=lambda *step: steps.append(step)) == 5
        assert merge_indexes([one, two], tmp_path / "all") == 0
    assert steps == [(done, 6) for done in range(1, 7)]
    with open_index(make_index(tmp_path / "whole", DOCUMENTS)) as whole, open_index(tmp_path / "all") as merged:
        assert merged.chunks() == whole.chunks()
        assert merged.search("words of number 3", 4) == whole.search("words of number 3", 4)
        assert merged.add(DOCUMENTS).unchanged == 5


def test_an_open_index_follows(tmp_path: Path) -> None:
    """A retriever that is open finds what was merged into its index, and no more what was replaced."""
    one = make_index(tmp_path / "one", [{"id": "0", "text": "a new text"}, DOCUMENTS[1]])
    with open_index(make_index(tmp_path / "all", DOCUMENTS[:1])) as index:
        assert merge_indexes([one], tmp_path / "all") == 2
        assert {document.id for document in index.documents()} == {"0", "1"}
        assert index.search("a new text", 1)[0].chunk.document_id == "0"


def test_refused(tmp_path: Path) -> None:
    """Indexes with other settings, and folders without one, are refused before anything is copied; an empty one is nothing."""
    one = make_index(tmp_path / "one", DOCUMENTS[:1])
    with open_index(tmp_path / "other", chunk_tokens=8) as other:
        assert merge_indexes([tmp_path / "other"], tmp_path / "all") == 0
        other.add(DOCUMENTS)
    with pytest.raises(RetrieverError, match="chunk_tokens"):
        merge_indexes([one, tmp_path / "other"], tmp_path / "all")
    with pytest.raises(RetrieverError, match="nowhere holds no index"):
        merge_indexes([one, tmp_path / "nowhere"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
