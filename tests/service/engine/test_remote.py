"""Engines that share a remote tier: KV of one is a hit at another, and faults of the server never reach an answer."""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engines import DOCUMENTS, QUESTION, OpenEngine, kinds
from recorded import RecordedAnswer, check_replay
from remote_servers import SECRET, RedisServer, remote_of
from served import serve
from waiting import wait_until

from cacheblend.base.errors import DeadlineError, ShuttingDownError
from cacheblend.blend import Fusor, Segment
from cacheblend.loader import FrontChunk, LoadingPlan
from cacheblend.service import Answer, Engine
from cacheblend.service.engine.prefill import LOOKUPS
from cacheblend.service.engine.request import Request
from cacheblend.service.serving import Done, Scheduler, ServingConfig
from cacheblend.store.remote.redis_backend import KEY_PREFIX
from cacheblend.store.remote.remote_tier import RemoteTier

BROUGHT = [{"title": str(document["title"]), "text": str(document["text"])} for document in DOCUMENTS[:2]]
TIMEOUT_S = 0.5


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()


@pytest.fixture
def remote_engine(redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path) -> Engine:
    """An engine that holds no KV itself, on a remote tier that another one has filled."""
    shared = {"remote": redis_server.url, "remote_secret": SECRET, "remote_timeout_s": TIMEOUT_S}
    writer = open_engine(store_dir=tmp_path / "writer", **shared)
    writer.answer(QUESTION, documents=BROUGHT)
    writer.background.drain()
    assert writer.store.flush_remote(10)
    writer.close()
    return open_engine(store_dir=tmp_path / "reader", ram_budget_bytes=1, nvme_budget_bytes=1, **shared)


def tiers(answer: Answer) -> list[str | None]:
    return [segment.tier for segment in answer.plan.segments if segment.tier is not None]


def test_a_miss_at_one_is_a_hit_at_the_other(remote_engine: Engine, open_engine: OpenEngine, tmp_path: Path) -> None:
    """What a request missed at one replica is read remotely at another, and gives the tokens that KV of its own gives."""
    alone = open_engine(store_dir=tmp_path / "alone")
    alone.answer(QUESTION, documents=BROUGHT)
    alone.background.drain()
    expected, found = (engine.answer(QUESTION, documents=BROUGHT) for engine in (alone, remote_engine))
    assert "remote" in tiers(found)
    assert not {"ram", "nvme"} & set(tiers(found))
    assert found.token_ids == expected.token_ids
    assert remote_engine.store.stats().misses == 0


def test_what_one_ingested_another_does_not_compute(redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path) -> None:
    """An ingest of a document that another replica has ingested takes its KV from the remote tier, durable as ever."""
    one, other = (open_engine(store_dir=tmp_path / name, remote=redis_server.url) for name in "ab")
    computed = one.ingest(DOCUMENTS)
    assert one.store.flush_remote(10)
    taken = other.ingest(DOCUMENTS)
    assert (taken.computed, taken.already_stored) == (0, computed.chunks)
    assert other.store.stats().nvme.entries == one.store.stats().nvme.entries
    other.documents.delete(str(DOCUMENTS[0]["id"]))
    assert other.store.flush_remote(10)
    assert len(list(remote_of(other.store).backend.ls())) < computed.chunks


@pytest.mark.parametrize("used", [False, True])
def test_a_deletion_takes_what_another_machine_has_put(
    used: bool, redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A document whose KV this store has never had, or in part, goes from the remote tier when it is deleted; others' stays."""
    writer = open_engine(store_dir=tmp_path / "a", remote=redis_server.url)
    writer.ingest(DOCUMENTS[1:])
    assert writer.store.flush_remote(10)
    others = set(remote_of(writer.store).backend.ls())
    writer.ingest(DOCUMENTS[:1])
    assert writer.store.flush_remote(10)
    assert set(remote_of(writer.store).backend.ls()) > others
    writer.close()
    # The index alone comes over, as one does that machines share.
    shutil.copytree(tmp_path / "a" / "index", tmp_path / "b" / "index")
    reader = open_engine(store_dir=tmp_path / "b", remote=redis_server.url)
    if used:
        reader.answer(QUESTION)
    reader.documents.delete(str(DOCUMENTS[0]["id"]))
    assert reader.store.flush_remote(10)
    assert set(remote_of(reader.store).backend.ls()) == others


def test_a_new_version_takes_the_old_ones_entries_along(
    redis_server: RedisServer, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A document that is ingested anew, longer at its start and cut at its end, leaves no entry of its old text remotely."""
    engine = open_engine(store_dir=tmp_path / "a", remote=redis_server.url)
    remote = remote_of(engine.store)
    engine.ingest(DOCUMENTS)
    assert engine.store.flush_remote(10)
    before = {name for name, _ in remote.backend.ls()}
    text = str(DOCUMENTS[0]["text"])
    engine.ingest([DOCUMENTS[0] | {"text": "Another beginning. " + text[: len(text) // 2]}])
    assert engine.store.flush_remote(10)
    after = {name for name, _ in remote.backend.ls()}
    assert before - after
    assert after - before
    assert after == {remote.format.name(row.key.digest) for row in engine.store.ls()}
    engine.store.clear()
    engine.documents.delete(str(DOCUMENTS[0]["id"]))
    assert engine.store.flush_remote(10)
    assert {name for name, _ in remote.backend.ls()} == before & after


def _paused(server: RedisServer) -> None:
    server.pause()


def _killed(server: RedisServer) -> None:
    server.kill()


def _flipped(server: RedisServer) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        for name in client.scan_iter(match=KEY_PREFIX + b"*"):
            client.setrange(name, client.strlen(name) - 9, b"wrong")


def _gone(server: RedisServer) -> None:
    import redis

    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()


@pytest.mark.parametrize("fault", [_paused, _killed, _flipped, _gone])
def test_faults_between_look_up_and_layers_never_reach_an_answer(
    fault: Callable[[RedisServer], None],
    remote_engine: Engine,
    redis_server: RedisServer,
    open_engine: OpenEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that fails after a request has planned with it costs the request no more than the time-out, and no token."""
    expected = open_engine(store_dir=tmp_path / "empty").answer(QUESTION, documents=BROUGHT, method="full_recompute")
    open_stream = RemoteTier.open_stream
    faults: list[str] = []

    def failing(tier: RemoteTier) -> object:
        if not faults:
            faults.append("one")
            fault(redis_server)
        return open_stream(tier)

    monkeypatch.setattr(RemoteTier, "open_stream", failing)
    started = time.monotonic()
    answer = remote_engine.answer(QUESTION, documents=BROUGHT)
    assert time.monotonic() - started < 10
    assert faults
    assert answer.token_ids == expected.token_ids
    assert "remote" not in tiers(answer)
    stats = remote_of(remote_engine.store).stats()
    assert (stats.failures > 0) == (fault in (_paused, _killed))
    assert (stats.damaged > 0) == (fault is _flipped)
    if fault is _paused:
        redis_server.resume()
        wait_until(lambda: remote_of(remote_engine.store).reads.wait_s() == 0)
        assert "remote" in tiers(remote_engine.answer(QUESTION, documents=BROUGHT))


@pytest.mark.parametrize("method", ["open_all", "open_stream"])
@pytest.mark.parametrize("end", ["cancelled", "late", "stopped"])
def test_nobody_else_waits_for_a_slow_remote(
    method: str, end: str, remote_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request's look-up, or its layers, do not come, others are prefilled and decode; it ends when it is cancelled,
    past its deadline, or the service stops.
    """
    original, asked, may_go_on = getattr(RemoteTier, method), threading.Event(), threading.Event()

    def slow(tier: RemoteTier, *args: object) -> object:
        stream_or_found = original(tier, *args)
        if method == "open_all":
            asked.set()
            assert may_go_on.wait(110)
            return stream_or_found
        receive = stream_or_found.receive

        def receiving() -> object:
            asked.set()
            assert may_go_on.wait(110)
            return receive()

        stream_or_found.receive = receiving
        return stream_or_found

    monkeypatch.setattr(RemoteTier, method, slow)
    monkeypatch.setattr("cacheblend.loader.lane.MIN_GRACE_S", 1000.0)
    ended: list[object] = []
    config = ServingConfig(guard_share=0.0, deadline_s=0.5 if end == "late" else 300.0, grace_s=0.0)
    try:
        with Scheduler(remote_engine.fusor, config, lambda request, how: ended.append((request.tenant, how))) as scheduler:
            slowed = serve(remote_engine, scheduler, QUESTION, tenant="slow", documents=BROUGHT)
            assert asked.wait(60)
            if end != "late":
                other = serve(remote_engine, scheduler, QUESTION, tenant="b", documents=BROUGHT, method="full_recompute")
                assert isinstance(other.result(), Done)
            if end == "cancelled":
                slowed.cancel()
                wait_until(lambda: ("slow", None) in ended)
            elif end == "late":
                assert isinstance(slowed.result().error, DeadlineError)
        if end == "stopped":
            assert isinstance(slowed.result().error, ShuttingDownError)
    finally:
        may_go_on.set()


def test_a_stream_that_stands_still_is_given_up_without_a_profile(
    remote_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was measured and the request names its ratio, what is remote is waited for no longer than a guess says."""
    expected = remote_engine.answer(QUESTION, documents=BROUGHT, method="full_recompute")
    may_go_on, open_stream = threading.Event(), RemoteTier.open_stream

    def still(tier: RemoteTier) -> object:
        stream = open_stream(tier)
        stream.receive = lambda: may_go_on.wait(110) and None  # type: ignore[method-assign,assignment]  # in its place
        return stream

    monkeypatch.setattr(RemoteTier, "open_stream", still)
    try:
        answer = remote_engine.answer(QUESTION, documents=BROUGHT, recompute_ratio=0.5)
    finally:
        may_go_on.set()
    assert "remote" not in tiers(answer)
    assert answer.token_ids == expected.token_ids
    assert remote_of(remote_engine.store).stats().failures > 0


def test_a_look_up_that_outlives_its_request_pins_nothing(remote_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked up for a request that is over by then is let go of."""
    may_go_on, open_all = threading.Event(), RemoteTier.open_all

    def slow(tier: RemoteTier, digests: Sequence[str]) -> object:
        assert may_go_on.wait(110)
        return open_all(tier, digests)

    monkeypatch.setattr(RemoteTier, "open_all", slow)
    steps = remote_engine.prefill_steps(remote_engine.prepare(QUESTION, documents=BROUGHT))
    next(steps)
    steps.close()
    may_go_on.set()
    wait_until(lambda: LOOKUPS.busy == 0)
    wait_until(lambda: not remote_engine.store._pins._pinned)


@pytest.mark.parametrize("fault", [_gone, _flipped])
def test_an_emptied_remote_costs_three_rounds_at_most(
    fault: Callable[[RedisServer], None],
    remote_engine: Engine,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many of a request's chunks are gone or damaged since they were looked up, it is begun again twice."""
    remote_engine.answer(QUESTION, documents=BROUGHT)
    fault(redis_server)
    rounds, open_all = [], RemoteTier.open_all

    def counted(tier: RemoteTier, digests: Sequence[str]) -> object:
        rounds.append(len(digests))
        return open_all(tier, digests)

    monkeypatch.setattr(RemoteTier, "open_all", counted)
    answer = remote_engine.answer(QUESTION, documents=BROUGHT)
    assert "remote" not in tiers(answer)
    assert rounds[0] > 4
    assert len(rounds) <= 2


class FrontOfOne:
    """A controller that has the first chunk computed while the others come."""

    def plan(self, *, front: Sequence[FrontChunk], **_: object) -> LoadingPlan:
        seconds = {"load_s": 1.0, "recompute_s": 1.0, "prefill_s": 1.0, "precompute_s": 0.0, "full_s": 100.0}
        chunks = 1 if len(front) > 1 else 0
        return LoadingPlan(ratio=0.5, load_s_by_tier={}, full_recompute=False, front_chunks=chunks, **seconds)

    def full_s(self, tokens: int) -> float:
        return 100.0

    def record(self, plan: LoadingPlan, *, load_s: float, compute_s: float | None) -> None:
        """Learn nothing."""


def asked(engine: Engine) -> Request:
    """A request that leaves the ratio to the controller."""
    return replace(engine.prepare(QUESTION, documents=BROUGHT), recompute_ratio=None)


@pytest.fixture
def watched(remote_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """When the engine opened a stream, and computed a front; a front waits until a stream is open."""
    seen: list[str] = []
    open_stream, front_steps = RemoteTier.open_stream, Fusor.front_steps

    def opening(tier: RemoteTier) -> object:
        seen.append("stream")
        return open_stream(tier)

    def computing(fusor: Fusor, segments: Iterable[Segment]) -> object:
        wait_until(lambda: bool(seen))
        seen.append("front")
        return front_steps(fusor, segments)

    monkeypatch.setattr(RemoteTier, "open_stream", opening)
    monkeypatch.setattr(Fusor, "front_steps", computing)
    remote_engine._prefiller.controller = FrontOfOne()  # type: ignore[assignment]  # in its place
    return seen


def test_the_first_chunk_is_computed_while_the_others_come(remote_engine: Engine, watched: list[str]) -> None:
    """The others are asked for before the front is computed, and the answer's recorded plan replays."""
    answer = remote_engine.complete(asked(remote_engine))
    assert watched == ["stream", "front"]
    assert kinds(answer) == ["exact", "fresh", *["reused"] * (len(answer.chunks) - 1), "fresh"]
    assert (answer.plan.hits, answer.plan.misses) == (len(answer.chunks) - 1, 0)
    assert check_replay(remote_engine.fusor, RecordedAnswer.of(answer)) == "equal"


@pytest.mark.parametrize("fault", [_killed, _flipped])
def test_a_front_is_kept_where_the_others_do_not_come(
    fault: Callable[[RedisServer], None],
    remote_engine: Engine,
    redis_server: RedisServer,
    watched: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the remote tier fails behind a front, the rest is computed after it, and the front not again."""
    expected = remote_engine.answer(QUESTION, documents=BROUGHT, method="full_recompute")
    open_stream = RemoteTier.open_stream

    def failing(tier: RemoteTier) -> object:
        if not watched:
            fault(redis_server)
        return open_stream(tier)

    monkeypatch.setattr(RemoteTier, "open_stream", failing)
    request = asked(remote_engine)
    deque(remote_engine._prefiller.steps(request), maxlen=0)
    assert watched.count("front") == 1
    assert float((request.fused.logits - expected.first_logits).abs().max()) <= 1e-4


def test_another_salt_finds_nothing_of_it(remote_engine: Engine) -> None:
    """A request with a salt misses what requests without one have put into the remote tier, and the counters say so."""
    before = remote_of(remote_engine.store).stats()
    answer = remote_engine.complete(remote_engine.prepare(QUESTION, documents=BROUGHT, cache_salt="tenant"))
    assert "remote" not in tiers(answer)
    after = remote_of(remote_engine.store).stats()
    assert (after.hits, after.read_bytes) == (before.hits, before.read_bytes)
