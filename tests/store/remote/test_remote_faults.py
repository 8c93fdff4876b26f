"""Faults of the remote tier, with the real server: no wrong bytes, no error of a request, no wait over the time-out."""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from chunks import make_chunk, same
from remote_servers import SECRET, OpenShared, RedisServer, bad_server, remote_of
from waiting import wait_until

from cacheblend.base.errors import DamagedEntryError, RemoteError
from cacheblend.store import KVStore
from cacheblend.store.remote.backend import ObjectRange
from cacheblend.store.remote.breaker import FAILURES, CircuitBreaker
from cacheblend.store.remote.redis_backend import KEY_PREFIX
from cacheblend.store.remote.remote_tier import RemoteStats

CHUNKS = [make_chunk(seed) for seed in range(1, 5)]
KEYS = [key for key, _ in CHUNKS]
TIMEOUT_S = 0.3
SLACK_S = 2.0  # of a loaded machine


def stats_of(store: KVStore) -> RemoteStats:
    stats = store.stats().remote
    assert stats is not None
    return stats


def filled(open_shared: OpenShared, url: str, **options: object) -> KVStore:
    """A store that read nothing yet, on a remote tier that another one has filled."""
    with open_shared("writer", url, **options) as writer:
        for key, kv in CHUNKS:
            writer.put(key, kv)
        assert writer.flush_remote(10)
    return open_shared("reader", url, remote_timeout_s=TIMEOUT_S, **options)


def took_s(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_a_killed_server_makes_misses(own_redis: RedisServer, open_shared: OpenShared) -> None:
    """After SIGKILL every look-up is a miss at once; started again, the server is asked again, and written to."""
    store = filled(open_shared, own_redis.url)
    assert store.get(KEYS[0]) is not None
    own_redis.kill()
    for _ in range(2):
        assert took_s(lambda: store.get(KEYS[1])) < TIMEOUT_S + SLACK_S
        assert store.get(KEYS[2]) is None
    assert stats_of(store).failures >= FAILURES
    store.put(*make_chunk(50))
    own_redis.start()
    wait_until(lambda: stats_of(store).state != "open")
    store.get(KEYS[3])
    assert store.flush_remote(10)
    assert remote_of(store).contains([make_chunk(50)[0].digest])
    assert stats_of(store).state == "closed"


def test_a_paused_server_is_left_after_the_time_out(own_redis: RedisServer, open_shared: OpenShared) -> None:
    """A server that stops in the middle of a request ends the read within the time-out; resumed, its entries are hits again."""
    store = filled(open_shared, own_redis.url)
    with store.pin(KEYS) as placements:
        assert placements[0] is not None
        own_redis.pause()
        placement = placements[0]
        with pytest.raises(RemoteError):
            placement.read_layer(1)
        assert took_s(lambda: store.get(make_chunk(60)[0])) < TIMEOUT_S + SLACK_S
    while stats_of(store).state == "closed":
        assert store.get(make_chunk(61)[0]) is None
    assert took_s(lambda: store.get(make_chunk(62)[0])) < TIMEOUT_S / 2 + SLACK_S  # nothing is asked any more
    own_redis.resume()
    wait_until(lambda: same(store.get(KEYS[1]), CHUNKS[1][1]))
    assert stats_of(store).state == "closed"


def test_a_full_server_takes_nothing_and_hinders_nobody(own_redis: RedisServer, open_shared: OpenShared) -> None:
    """Out of memory, the server refuses what is written: that is counted, reads go on, and puts return as ever."""
    store = filled(open_shared, own_redis.url)
    with redis.Redis(unix_socket_path=str(own_redis.socket)) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
    started = time.monotonic()
    for seed in range(70, 80):
        store.put(*make_chunk(seed))
    assert time.monotonic() - started < 10
    assert same(store.get(KEYS[0]), CHUNKS[0][1])
    wait_until(lambda: remote_of(store).writes.state != "closed")
    assert stats_of(store).state == "closed"
    store.close()
    assert stats_after_close(store).dropped_writes == 10


def stats_after_close(store: KVStore) -> RemoteStats:
    remote = store._remote
    assert remote is not None
    return remote.tier.stats()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_flipped_bits_are_misses(own_redis: RedisServer, open_shared: OpenShared, secret: str | None) -> None:
    """A bit that was flipped anywhere in an object is found when that part is read, counted, and never used."""
    store = filled(open_shared, own_redis.url, remote_secret=secret)
    remote = remote_of(store)
    with redis.Redis(unix_socket_path=str(own_redis.socket)) as client:
        names = [KEY_PREFIX + remote.format.name(key.digest).encode() for key in KEYS]
        good = client.get(names[0])
        assert isinstance(good, bytes)
        start = 4096 if secret else 0
        places = [start + 3, start + 20, start + 300, len(good) - 1, len(good) - 500] + ([0, 9, 13, 50] if secret else [])
        for count, at in enumerate(places, start=1):
            bad = bytearray(good)
            bad[at] ^= 4
            client.set(names[0], bytes(bad))
            assert store.get(KEYS[0]) is None, f"byte {at}"
            assert stats_of(store).damaged == count
            remote._missing.clear()  # look at it again now, not in a minute
        client.set(names[0], client.get(names[1]) or b"")  # another entry's object under this name
        assert store.get(KEYS[0]) is None
        remote._missing.clear()
        client.set(names[0], good)
    assert same(store.get(KEYS[0]), CHUNKS[0][1])


def test_damage_is_logged_once_and_written_anew(
    own_redis: RedisServer, open_shared: OpenShared, caplog: pytest.LogCaptureFixture
) -> None:
    """Many damaged objects make one warning; whoever computes such a chunk writes a whole object in its place."""
    store = filled(open_shared, own_redis.url)
    with redis.Redis(unix_socket_path=str(own_redis.socket)) as client:
        for key in client.scan_iter():
            client.setrange(key, 40, b"rubbish")
    with caplog.at_level("WARNING"), store.pin(KEYS) as placements:
        assert placements == [None] * 4
    assert len([record for record in caplog.records if "is not what was written" in record.getMessage()]) == 1
    assert stats_of(store).damaged == 4
    store.put(*CHUNKS[0])
    assert store.flush_remote(10)
    assert same(open_shared("other", own_redis.url).get(KEYS[0]), CHUNKS[0][1])


@pytest.mark.parametrize("kept", [0, 5, 4096, 4500])
def test_partial_values_are_misses(own_redis: RedisServer, open_shared: OpenShared, kept: int) -> None:
    """An object that ends early gives no layer that is not whole."""
    store = filled(open_shared, own_redis.url)
    with redis.Redis(unix_socket_path=str(own_redis.socket)) as client:
        name = KEY_PREFIX + remote_of(store).format.name(KEYS[0].digest).encode()
        whole = client.get(name)
        assert isinstance(whole, bytes)
        client.set(name, whole[:kept] or b"x")
    with store.pin(KEYS[:1]) as (placement,):
        if placement is not None:
            with pytest.raises(DamagedEntryError):  # or its subclass: nothing came at all
                placement.read_layer(2)
    store.flush()
    hits = stats_of(store).hits
    assert store.get(KEYS[0]) is None
    assert stats_of(store).hits == hits  # not looked up again, to fail again


def test_garbage_is_no_answer(tmp_path_factory: pytest.TempPathFactory, open_shared: OpenShared) -> None:
    """A server that speaks another protocol is one that is away."""

    def garbage(connection: socket.socket) -> None:
        while connection.recv(4096):
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(range(256)))

    with bad_server(tmp_path_factory.mktemp("g"), garbage) as url:
        store = open_shared("reader", url, remote_timeout_s=TIMEOUT_S)
        for key in KEYS:
            assert store.get(key) is None
        assert stats_of(store).failures >= FAILURES
        assert stats_of(store).state == "open"


@pytest.mark.parametrize(
    "answer", [b":7\r\n", b"*1\r\n$1\r\nx\r\n", b"*1\r\n" * 20_000 + b":1\r\n", b"$x\r\n", b"*-1\r\n", b"$-1\r\n"]
)
def test_answers_of_another_kind_are_none(
    tmp_path_factory: pytest.TempPathFactory, open_shared: OpenShared, answer: bytes
) -> None:
    """Numbers, lists, nested lists and nothing where bytes were asked for make misses and failures, and no other errors."""

    def garbage(connection: socket.socket) -> None:
        while connection.recv(4096):
            connection.sendall(answer)

    with bad_server(tmp_path_factory.mktemp("k"), garbage) as url:
        store = open_shared("reader", url, remote_timeout_s=TIMEOUT_S)
        assert store.get(KEYS[0]) is None
        with store.pin(KEYS[1:2]) as placements:
            assert placements == [None]
        remote = remote_of(store)
        assert remote.contains([KEYS[2].digest]) <= {KEYS[2].digest}
        assert stats_of(store).failures >= 2


def test_a_reader_that_is_closed_aborts_nobody(redis_server: RedisServer, open_shared: OpenShared) -> None:
    """Who gives a reader up after it was closed does not end the next one, which has its connection."""
    remote = remote_of(open_shared("a", redis_server.url))
    first = remote.backend.reader()
    first.close()
    with remote.reader() as second:
        first.abort()
        second.request([ObjectRange("none", 0, 1)])
        assert second.receive() is None


def test_a_server_that_never_answers_costs_the_time_out(
    tmp_path_factory: pytest.TempPathFactory, open_shared: OpenShared
) -> None:
    """Connections that are taken and never answered are left after the time-out, and not made any more after a few."""
    ended = threading.Event()

    def silent(_: socket.socket) -> None:
        ended.wait(60)

    with bad_server(tmp_path_factory.mktemp("s"), silent) as url:
        store = open_shared("reader", url, remote_timeout_s=TIMEOUT_S)
        for key in KEYS[:FAILURES]:
            assert took_s(lambda key=key: store.get(key)) < TIMEOUT_S + SLACK_S  # type: ignore[misc]  # bound now
        assert stats_of(store).state == "open"
        ended.set()


def test_a_server_that_trickles_costs_the_time_out(tmp_path_factory: pytest.TempPathFactory, open_shared: OpenShared) -> None:
    """An answer of which a byte comes now and then ends with the look-up's time, however long it goes on."""
    ended = threading.Event()

    def trickle(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"$16384\r\n")
        while not ended.wait(0.05):
            connection.sendall(b"x")

    with bad_server(tmp_path_factory.mktemp("t"), trickle) as url:
        store = open_shared("reader", url, remote_timeout_s=TIMEOUT_S)
        assert took_s(lambda: store.get(KEYS[0])) < TIMEOUT_S + SLACK_S
        assert stats_of(store).failures == 1
        ended.set()


def test_an_address_that_nobody_answers_is_away(open_shared: OpenShared, tmp_path: Path) -> None:
    """A socket that is not there, and a host that is slow to connect, make misses within the time-out."""
    for replica, url in (("a", f"unix://{tmp_path}/none.sock"), ("b", "redis://192.0.2.1:6379")):
        store = open_shared(replica, url, remote_timeout_s=TIMEOUT_S)
        assert took_s(lambda store=store: store.get(KEYS[0])) < TIMEOUT_S + SLACK_S  # type: ignore[misc]  # bound now
        assert stats_of(store).failures == 1


def test_the_breaker_opens_tries_once_and_closes() -> None:
    """After failures in a row nobody calls for a pause, then one does: its failure doubles the pause, its success ends it."""
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    assert [breaker.fail() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert not breaker.allows()
    now += breaker.wait_s()
    assert (breaker.state, breaker.allows(), breaker.allows()) == ("half open", True, False)
    assert breaker.wait_s() == 1.0  # until the one who tries counts as given up
    assert breaker.fail()
    assert breaker.wait_s() == 2.0
    now += 2.0
    assert breaker.allows()
    breaker.succeed()
    assert (breaker.state, breaker.wait_s()) == ("closed", 0.0)
