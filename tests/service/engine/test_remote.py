"""Engines that share a remote tier: KV of one is a hit at another, and faults of the server never reach an answer."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import DOCUMENTS, QUESTION, OpenEngine
from remote_servers import SECRET, RedisServer, needs

from cacheblend.service import Engine
from cacheblend.store.remote import KEY_PREFIX, RemoteStats

BROUGHT = [{"title": str(document["title"]), "text": str(document["text"])} for document in DOCUMENTS[:2]]
TIMEOUT_S = 0.5  # where the server fails
PATIENT_S = 60.0  # where it does not: a late answer would be a miss


@pytest.fixture
def remote_engine(request: pytest.FixtureRequest, redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path) -> Engine:
    """An engine that holds no KV yet, on a remote tier that another one has filled."""
    timeout_s = getattr(request, "param", PATIENT_S)
    shared = {"remote": redis_server.url, "remote_secret": SECRET, "remote_timeout_s": timeout_s}
    writer = open_engine(store_dir=tmp_path / "writer", **shared)
    writer.answer(QUESTION, documents=BROUGHT)
    writer.background.drain()
    assert writer.store.flush_remote(60)
    writer.close()
    return open_engine(store_dir=tmp_path / "reader", **shared)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its chunks, however small the model is."""
    monkeypatch.setattr("cacheblend.loader.estimators.SLOW_START_S", PATIENT_S)


@pytest.mark.usefixtures("_patient")
def test_a_miss_at_one_is_a_hit_at_the_other(remote_engine: Engine, open_engine: OpenEngine, tmp_path: Path) -> None:
    """KV that one engine computed for a request is fetched for a request at another, which answers as with KV of its own."""
    alone = open_engine(store_dir=tmp_path / "alone")
    alone.answer(QUESTION, documents=BROUGHT)
    alone.background.drain()
    expected, found = (engine.answer(QUESTION, documents=BROUGHT) for engine in (alone, remote_engine))
    assert found.plan.hits == expected.plan.hits == len(found.chunks)
    assert found.token_ids == expected.token_ids
    assert remote_engine.store.stats().misses == 0
    assert stats_of(remote_engine).hits == len(found.chunks)


def test_what_one_ingested_another_does_not_compute(redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path) -> None:
    """An ingest of a document that another engine has ingested fetches its KV, durable as ever; a deletion removes it there."""
    shared = {"remote": redis_server.url, "remote_timeout_s": PATIENT_S}
    one, other = (open_engine(store_dir=tmp_path / name, **shared) for name in "ab")
    computed = one.ingest(DOCUMENTS)
    assert one.store.flush_remote(60)
    report = other.ingest(DOCUMENTS)
    assert (report.computed, report.already_stored) == (0, computed.chunks)
    assert other.store.stats().nvme.entries == one.store.stats().nvme.entries
    other.documents.delete(str(DOCUMENTS[0]["id"]))
    assert other.store.flush_remote(60)
    keys = [entry.key for entry in one.store.ls()]
    third = open_engine(store_dir=tmp_path / "c", **shared)
    assert 0 < sum(third.store.find(keys)) < len(keys)


@pytest.mark.usefixtures("_patient")
def test_fetched_kv_goes_with_its_document(open_engine: OpenEngine, tmp_path: Path) -> None:
    """KV of another codec that a request fetched for an ingested document is removed with the document."""
    needs("obstore", "objects")
    shared = {"remote": f"file://{tmp_path}/shared", "kv_cache_dtype": "int8"}
    writer, raw = open_engine(store_dir=tmp_path / "writer", **shared), open_engine(store_dir=tmp_path / "reader")
    writer.ingest(DOCUMENTS)
    assert writer.store.flush_remote(60)
    raw.ingest(DOCUMENTS)
    reader = open_engine(store_dir=tmp_path / "reader", **shared)
    assert reader.answer(QUESTION, num_chunks=3).plan.hits == 3
    for document in DOCUMENTS:
        reader.documents.delete(str(document["id"]))
    assert reader.store.stats().nvme.entries == 0


def stats_of(engine: Engine) -> RemoteStats:
    stats = engine.store.stats().remote
    assert stats is not None
    return stats


def _flipped(server: RedisServer) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        for name in client.scan_iter(match=KEY_PREFIX + "*"):
            client.setrange(name, client.strlen(name) - 9, b"wrong")


def _gone(server: RedisServer) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()


@pytest.mark.parametrize("remote_engine", [TIMEOUT_S], indirect=True, ids=["in a hurry"])
@pytest.mark.parametrize("fault", [RedisServer.pause, RedisServer.kill, _flipped, _gone])
def test_faults_never_reach_an_answer(
    fault: Callable[[RedisServer], None],
    remote_engine: Engine,
    redis_server: RedisServer,
    open_engine: OpenEngine,
    tmp_path: Path,
) -> None:
    """A server that fails costs a request no more than the time-out, and no token."""
    expected = open_engine(store_dir=tmp_path / "empty").answer(QUESTION, documents=BROUGHT, method="full_recompute")
    fault(redis_server)
    started = time.monotonic()
    answer = remote_engine.answer(QUESTION, documents=BROUGHT)
    assert time.monotonic() - started < 60
    redis_server.resume()  # the engine's close would wait for it
    assert answer.token_ids == expected.token_ids
    assert answer.plan.hits == 0


def test_another_salt_finds_nothing_of_it(remote_engine: Engine) -> None:
    """A request with a salt misses what requests without one have put into the remote tier, and the counters say so."""
    answer = remote_engine.complete(remote_engine.prepare(QUESTION, documents=BROUGHT, cache_salt="tenant"))
    assert answer.plan.hits == 0
    assert stats_of(remote_engine).read_bytes == 0
