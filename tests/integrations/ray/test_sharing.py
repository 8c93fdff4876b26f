"""What an actor does so that the remote tier has a batch's KV; Ray itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines import CHUNK_TOKENS, make_model
from fakes import FakeEmbedder
from remote_servers import needs

from cacheblend.base.errors import RemoteError
from cacheblend.base.progress import Progress
from cacheblend.integrations.ray.tasks import share
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.ingest import DocumentEncoder, EncodedBatch
from cacheblend.store import ChunkKey, KVStore, StoreConfig
from cacheblend.store.kv_store import SharedEntries

DOCUMENTS = [Document(id=f"d{number}", title="", text=f"words of {number} that are many and more") for number in range(3)]
PAUSES_S = (0.0, 0.0, 0.0)
ONE_ENTRY = 2**16  # of the queue, which drops the others


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine whose remote tier takes little on the way."""
    needs("obstore", "objects")
    make_model(tmp_path / "model")
    store = StoreConfig(remote=f"file://{tmp_path}/shared", remote_queue_bytes=ONE_ENTRY)
    config = EngineConfig(
        model=str(tmp_path / "model"),
        store_dir=tmp_path / "store",
        store=store,
        retriever=RetrieverConfig(chunk_tokens=CHUNK_TOKENS),
    )
    with Engine(config, embedder=FakeEmbedder()) as engine:
        yield engine


@pytest.fixture
def encoder(engine: Engine) -> DocumentEncoder:
    return DocumentEncoder(engine._encoder, engine.retriever, engine.store, fetches=False)


@pytest.fixture
def batch(encoder: DocumentEncoder) -> EncodedBatch:
    """Documents whose KV is computed, and in the remote tier in part."""
    encoded = encoder.split(DOCUMENTS, DOCUMENTS, Progress())
    encoder.compute(encoded, encoded.distinct_keys, Progress())
    return encoded


def missing(engine: Engine, batch: EncodedBatch, tmp_path: Path) -> int:
    """Number of a batch's entries that the remote tier lacks."""
    with KVStore(replace(engine.store.config, directory=tmp_path / "looks")) as looks:
        return looks.find(batch.distinct_keys).count(False)


def test_evicted_chunks_are_computed_again(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch, tmp_path: Path
) -> None:
    """A chunk that neither the disk nor the remote tier has is in the remote tier at the end, and its tokens are counted."""
    engine.store.flush_remote(10)
    engine.store.delete(batch.distinct_keys[0])
    engine.store.flush_remote(10)
    engine.store.clear()
    tokens, computed = batch.tokens, len(batch.computed)
    assert missing(engine, batch, tmp_path)
    share(engine.store, encoder, batch)
    assert missing(engine, batch, tmp_path) == 0
    assert batch.tokens > tokens
    assert len(batch.computed) == computed


def test_a_remote_that_is_away(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote tier that refuses some calls, as a server that restarts does, ends no ingest; after the last pause its error
    is raised: no document is committed whose KV is nowhere.
    """
    own, refusals = engine.store.share, [True] * 7

    def refuse(keys: list[ChunkKey]) -> SharedEntries:
        if refusals and refusals.pop():
            raise RemoteError("away for a moment")
        return own(keys)

    monkeypatch.setattr(engine.store, "share", refuse)
    with pytest.raises(RemoteError, match="away for a moment"):
        share(engine.store, encoder, batch, PAUSES_S)
    assert len(refusals) == 3
    share(engine.store, encoder, batch, PAUSES_S)
    assert missing(engine, batch, tmp_path) == 0
