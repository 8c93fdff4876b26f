"""What an actor does so that the remote tier has a batch's KV; Ray itself is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from engines import CHUNK_TOKENS, make_model
from fakes import FakeEmbedder
from remote_servers import needs, remote_of

from cacheblend.base.errors import RemoteError
from cacheblend.integrations.ray import precompute_actor
from cacheblend.integrations.ray.precompute_actor import share
from cacheblend.retriever import Document, RetrieverConfig
from cacheblend.service import Engine, EngineConfig
from cacheblend.service.engine.document_encoder import DocumentEncoder, EncodedDocuments, EncodingWatch
from cacheblend.store import StoreConfig

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
def batch(encoder: DocumentEncoder) -> EncodedDocuments:
    """Documents whose KV is computed, and in the remote tier in part."""
    encoded = encoder.split(DOCUMENTS, DOCUMENTS, EncodingWatch())
    encoder.compute(encoded, encoded.distinct_keys, EncodingWatch())
    return encoded


def missing(engine: Engine, batch: EncodedDocuments) -> int:
    digests = [key.digest for key in batch.distinct_keys]
    return len(digests) - len(remote_of(engine.store).contains(digests))


def test_what_the_disk_evicted_is_computed_again(engine: Engine, encoder: DocumentEncoder, batch: EncodedDocuments) -> None:
    """A chunk that neither the disk nor the remote tier has is in the remote tier at the end, and its tokens are counted."""
    engine.store.flush_remote(10)
    remote_of(engine.store).backend.delete([remote_of(engine.store).format.name(batch.distinct_keys[0].digest)])
    engine.store.clear()
    lost, tokens, computed = missing(engine, batch), batch.tokens, len(batch.computed)
    assert lost
    share(engine.store, encoder, batch)
    assert missing(engine, batch) == 0
    assert batch.tokens > tokens
    assert len(batch.computed) == computed


def _failing(engine: Engine, times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have the remote tier refuse so many calls; gives how many it refused."""
    backend, refused = remote_of(engine.store).backend, [0]
    sizes = backend.sizes

    def failing(names: Sequence[str]) -> list[int | None]:
        if refused[0] < times:
            refused[0] += 1
            raise RemoteError("away for a moment")
        return sizes(names)

    monkeypatch.setattr(backend, "sizes", failing)
    return lambda: refused[0]


def test_a_remote_that_is_away_for_a_moment(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedDocuments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote tier that refuses some calls, as a server that restarts does, ends no ingest."""
    engine.store.flush_remote(10)
    refused = _failing(engine, 3, monkeypatch)
    share(engine.store, encoder, batch)
    assert refused() == 3
    assert missing(engine, batch) == 0


def test_a_remote_that_stays_away(
    engine: Engine, encoder: DocumentEncoder, batch: EncodedDocuments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last pause the error is told: no document is committed whose KV is nowhere."""
    engine.store.flush_remote(10)
    refused = _failing(engine, 100, monkeypatch)
    with pytest.raises(RemoteError, match="away for a moment"):
        share(engine.store, encoder, batch)
    assert refused() == 4
