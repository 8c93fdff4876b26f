"""What an actor does so that the remote tier has a batch's KV; Ray itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, make_model
from fakes import FakeEmbedder
from remote_servers import needs

from cacheblend.base.errors import RemoteError
from cacheblend.base.progress import Progress
from cacheblend.integrations.ray import precompute_actor
from cacheblend.integrations.ray.precompute_actor import share
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.ingest import DocumentEncoder, EncodedBatch
from cacheblend.store import ChunkKey, KVStore, StoreConfig
from cacheblend.store.kv_store import SharedEntries

DOCUMENTS = [Document(id=f"d{number}", title="", text=f"words of {number} that are many and more") for number in range(3)]
ONE_ENTRY = 2**16  # of the queue, which drops the others


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose remote tier takes little on the way."""
    needs("obstore", "objects")
    make_model(tmp_path / "model")
    monkeypatch.setattr(precompute_actor, "PAUSES_S", (0.0, 0.0, 0.0))
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


class RefusingStore:
    """A store whose remote tier refuses the first calls."""

    has_remote = True

    def __init__(self, store: KVStore, refusals: int) -> None:
        self._store, self.refusals, self.config = store, refusals, store.config
        self.flush_remote = store.flush_remote

    def share(self, keys: Sequence[ChunkKey]) -> SharedEntries:
        """See `KVStore.share`."""
        if self.refusals:
            self.refusals -= 1
            raise RemoteError("away for a moment")
        return self._store.share(keys)


def test_a_remote_that_is_away_for_a_moment(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch, tmp_path: Path
) -> None:
    """A remote tier that refuses some calls, as a server that restarts does, ends no ingest."""
    refusing: Any = RefusingStore(engine.store, 3)
    share(refusing, encoder, batch)
    assert refusing.refusals == 0
    assert missing(engine, batch, tmp_path) == 0


def test_a_remote_that_stays_away(engine: Engine, encoder: DocumentEncoder, batch: EncodedBatch) -> None:
    """After the last pause the error is raised: no document is committed whose KV is nowhere."""
    refusing: Any = RefusingStore(engine.store, 100)
    with pytest.raises(RemoteError, match="away for a moment"):
        share(refusing, encoder, batch)
    assert refusing.refusals == 96
