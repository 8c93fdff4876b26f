"""The stores of several machines become one, with all that was ingested into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import CHUNK_TOKENS, DOCUMENTS, QUESTION, TOP_K, OpenEngine

from cacheblend.base.errors import RetrieverError, StoreDirectoryError
from cacheblend.retriever import Document
from cacheblend.service.engine.document_sources import Shard
from cacheblend.service.engine.ingest import merge_stores

COUNT = 2


@pytest.fixture
def shards(open_engine: OpenEngine, tmp_path: Path) -> list[Path]:
    """The documents, ingested by two machines."""
    folders = []
    for index in range(1, COUNT + 1):
        folders.append(tmp_path / f"shard-{index}")
        engine = open_engine(store_dir=folders[-1])
        engine.ingest_stream(one for one in map(Document.of, DOCUMENTS) if Shard(index, COUNT).holds(one.id))
        engine.close()
    return folders


def test_merged_store_answers_as_one(open_engine: OpenEngine, shards: list[Path], tmp_path: Path) -> None:
    """A merged store answers with the tokens of a store that was ingested at once, and computes nothing again."""
    steps: list[tuple[str, int, int]] = []
    indexed, report = merge_stores(shards, tmp_path / "all", lambda *step: steps.append(step))
    assert indexed == report.documents == len(DOCUMENTS)
    assert {stage for stage, _, _ in steps} == {"index", "copy"}
    whole = open_engine(store_dir=tmp_path / "whole")
    whole.ingest(DOCUMENTS)
    merged = open_engine(store_dir=tmp_path / "all")
    entries = {entry.key for entry in merged.store.ls()}
    assert entries == {entry.key for entry in whole.store.ls()}
    assert len(entries) == report.entries
    one, other = (engine.answer(QUESTION, top_k=TOP_K, method="full_recompute") for engine in (merged, whole))
    assert [scored.chunk for scored in one.chunks] == [scored.chunk for scored in other.chunks]
    assert one.token_ids == other.token_ids
    assert merged.answer(QUESTION, top_k=TOP_K).plan.hits == TOP_K
    again = merged.ingest(DOCUMENTS)
    assert (again.unchanged, again.computed) == (len(DOCUMENTS), 0)
    assert [status.as_dict() for status in merged.documents.ls() if status.stored_chunks < 1] == []
    indexed, report = merge_stores(shards, tmp_path / "all")
    assert (indexed, report.entries) == (0, 0)


def test_other_chunks_are_refused(open_engine: OpenEngine, shards: list[Path], tmp_path: Path) -> None:
    """Stores whose documents were split in another way are refused, and nothing is copied."""
    other = open_engine(store_dir=tmp_path / "other", chunk_tokens=CHUNK_TOKENS + 8)
    other.ingest(DOCUMENTS)
    other.close()
    with pytest.raises(RetrieverError, match="chunk_tokens"):
        merge_stores([*shards, tmp_path / "other"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
    with pytest.raises(RetrieverError, match="chunk_tokens"):
        merge_stores(shards, tmp_path / "other")


def test_no_store(shards: list[Path], tmp_path: Path) -> None:
    """A folder that holds no store is named."""
    with pytest.raises(StoreDirectoryError, match="nowhere/kv holds no store"):
        merge_stores([shards[0], tmp_path / "nowhere"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
