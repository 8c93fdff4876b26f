"""The remote tier: what one store writes, every store that shares it fetches, on each backend; whatever the server does."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash
from chunks import FILE_BYTES, MODEL, make_chunk, put_all, same
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_servers import SECRET, RedisServer, needs, s3_server
from waiting import wait_until

from cacheblend.base.errors import ConfigError, DamagedEntryError, RemoteError
from cacheblend.base.memory import Bytes
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig, remote
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.remote import (
    FAILURES,
    MAX_HEADER_BYTES,
    CircuitBreaker,
    ObjectFormat,
    RemoteAddress,
    RemoteStats,
    RemoteTier,
)

CHUNKS = [make_chunk(seed) for seed in range(1, 5)]
KEYS = [key for key, _ in CHUNKS]
LONG_S = 30.0  # a deadline that everything meets
OpenShared = Callable[..., KVStore]


@pytest.fixture(scope="session")
def s3_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    needs("obstore", "objects")
    return f"file://{tmp_path}/objects"


@pytest.fixture(params=["redis", "folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty remote tier of each backend."""
    match request.param:
        case "redis":
            return request.getfixturevalue("redis_server").url
        case "s3":
            return f"{request.getfixturevalue('s3_bucket')}/{tmp_path.name}"
    return request.getfixturevalue("folder_url")


@pytest.fixture
def open_shared(tmp_path: Path) -> Iterator[OpenShared]:
    """Opens a store by name on a remote tier; keywords go to `StoreConfig`. Closes what the test leaves open."""
    with ExitStack() as stack:

        def open_one(name: str, url: str, **options: object) -> KVStore:
            patient = {"remote_secret": SECRET, "remote_timeout_s": LONG_S}  # a late answer would be a miss
            given = {"directory": tmp_path / name, "remote": url, **patient, **options}
            return stack.enter_context(KVStore(StoreConfig(**given)))

        yield open_one


def written(store: KVStore) -> KVStore:
    """The store, with the chunks in it and in its remote tier."""
    assert put_all(store, CHUNKS).flush_remote(LONG_S)
    return store


def stats_of(store: KVStore) -> RemoteStats:
    return store.stats().remote


@pytest.mark.parametrize("secret", [None, SECRET])
def test_entries_are_fetched_where_they_are_missing(
    url: str, secret: str | None, open_shared: OpenShared, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks put at one store are fetched by another, bit for bit, into RAM and NVMe; `get` and `pin` fetch nothing.

    A remote tier without a secret is warned of when the store is opened.
    """
    written(open_shared("a", url, remote_secret=secret))
    assert ("no secret is set" in caplog.text) == (secret is None)
    other = open_shared("b", url, remote_secret=secret)
    assert other.get(KEYS[0]) is None
    with other.pin(KEYS) as placements:
        assert placements == [None] * 4
    assert other.find([*KEYS, make_chunk(9)[0]]) == [True] * 4 + [False]
    assert other.fetch([*KEYS, make_chunk(9)[0]], LONG_S) == 4
    with other.pin(KEYS) as placements:
        assert [placement and placement.tier for placement in placements] == ["ram"] * 4
    other.flush()
    assert other.stats().nvme.entries == 4
    assert other.verify().ok
    assert all(same(other.get(key), kv) for key, kv in CHUNKS)
    stats = stats_of(other)
    assert (stats.hits, stats.misses, stats.failures, stats.damaged, stats.sent) == (4, 1, 0, 0, 0)
    assert other.fetch(KEYS, LONG_S) == 0  # all of them are here


def test_deletions_are_sent(url: str, open_shared: OpenShared) -> None:
    """A deleted entry is a miss at once, and soon in every store that shares the remote tier; so is a document's."""
    one = written(open_shared("a", url))
    one.delete(KEYS[0])
    assert one.fetch(KEYS[:1], LONG_S) == 0
    one.documents.put([("text", "1", KEYS[1:2])])
    one.documents.delete("text")
    assert one.flush_remote(LONG_S)
    assert open_shared("b", url).find(KEYS) == [False, False, True, True]
    one.put(*CHUNKS[0])
    assert one.flush_remote(LONG_S)
    assert open_shared("c", url).fetch(KEYS, LONG_S) == 3


def test_share_sends_what_the_remote_lacks(url: str, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch) -> None:
    """`share` sends the missing entries only, and names those that neither side has."""
    alone = open_shared("a", url)
    monkeypatch.setattr(remote, "MAX_CHANGES", 0)
    put_all(alone, CHUNKS[:3])
    assert (stats_of(alone).sent, stats_of(alone).dropped_writes) == (0, 3)
    assert alone.share(KEYS[:2]) == []
    assert alone.share(KEYS) == KEYS[3:]
    assert stats_of(alone).sent == 3
    assert open_shared("b", url).fetch(KEYS, LONG_S) == 3


def test_a_store_smaller_than_an_entry_fetches_none(folder_url: str, open_shared: OpenShared) -> None:
    """An entry that is larger than the NVMe budget is no hit, and what is fetched evicts by LRU order."""
    written(open_shared("a", folder_url))
    assert open_shared("b", folder_url, nvme_budget_bytes=100).fetch(KEYS, LONG_S) == 0
    small = open_shared("c", folder_url, nvme_budget_bytes=2 * FILE_BYTES + 100, ram_budget_bytes=1)
    for key in KEYS:
        assert small.fetch([key], LONG_S) == 1
        small.flush()
    assert [key in small for key in KEYS] == [False, False, True, True]


def test_late_entries_are_stored_all_the_same(redis_server: RedisServer, open_shared: OpenShared) -> None:
    """A fetch returns at its deadline; later entries are hits of a later request, unless they were deleted meanwhile."""
    written(open_shared("a", redis_server.url))
    other = open_shared("b", redis_server.url, remote_timeout_s=LONG_S)
    redis_server.pause()
    started = time.monotonic()
    assert other.fetch(KEYS, 0.2) == 0
    assert time.monotonic() - started < LONG_S / 2
    assert other.fetch(KEYS[:2], 0.1) == 0  # waits for the same calls
    other.delete(KEYS[3])
    redis_server.resume()
    wait_until(lambda: all(key in other for key in KEYS[:3]))
    assert other.fetch(KEYS[:3], LONG_S) == 0
    assert same(other.get(KEYS[0]), CHUNKS[0][1])
    wait_until(lambda: stats_of(other).hits + stats_of(other).misses == 4)  # the server may have removed it before
    assert KEYS[3] not in other


def test_a_dead_server_makes_misses(redis_server: RedisServer, open_shared: OpenShared) -> None:
    """Without the server every fetch is a miss, soon at once, and puts go on; started again, it is asked again."""
    written(open_shared("a", redis_server.url))
    store = open_shared("b", redis_server.url, remote_timeout_s=0.2)
    redis_server.kill()
    assert store.fetch(KEYS, LONG_S) == 0
    assert store.find(KEYS) == [False] * 4
    assert (stats_of(store).state, stats_of(store).failures >= FAILURES) == ("open", True)
    store.put(*make_chunk(50))
    with pytest.raises(RemoteError, match="ConnectionError"):
        store.share([make_chunk(50)[0]])
    redis_server.start()
    assert store.flush_remote(LONG_S)
    wait_until(lambda: store.find([make_chunk(50)[0]]) == [True] and stats_of(store).state == "closed")


def test_a_silent_server_is_left(redis_server: RedisServer, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer costs the time-out; closing the store waits for as long as an object may take."""
    monkeypatch.setattr(remote, "MAX_TRANSFER_S", 1.0)
    written(open_shared("a", redis_server.url))
    store = open_shared("b", redis_server.url, remote_timeout_s=0.3)
    redis_server.pause()
    started = time.monotonic()
    assert store.fetch(KEYS, LONG_S) == 0
    store.put(*make_chunk(50))
    store.close()
    assert time.monotonic() - started < LONG_S / 2
    redis_server.resume()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_flipped_bits_are_misses(folder_url: str, tmp_path: Path, open_shared: OpenShared, secret: str | None) -> None:
    """A bit that was flipped anywhere in an object, or an end that is missing, is counted and never used."""
    written(open_shared("a", folder_url, remote_secret=secret))
    objects = ObjectFormat(secret and secret.encode())
    path = path_of(tmp_path, objects.name(KEYS[0].digest))
    good = path.read_bytes()
    places = [0, 3, 8, 20, 50, 300, 4096, len(good) - 500, len(good) - 1]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        store = open_shared(f"b{place}", folder_url, remote_secret=secret)
        assert store.fetch(KEYS[:2], LONG_S) == 1
        assert stats_of(store).damaged == 1
        assert KEYS[0] not in store
        store.close()
    for length in (0, 7, 100, len(good) - 1):
        with pytest.raises(DamagedEntryError):
            objects.unpack(KEYS[0].digest, np.frombuffer(good[:length], np.uint8))
    store = open_shared("mends", folder_url, remote_secret=secret)
    store.put(*CHUNKS[0])  # who computes it writes it anew
    assert store.flush_remote(LONG_S)
    assert open_shared("last", folder_url, remote_secret=secret).fetch(KEYS[:1], LONG_S) == 1


def path_of(tmp_path: Path, name: str) -> Path:
    return tmp_path / "objects" / name[:2] / name


def test_without_the_secret_nobody_names_or_forges_objects(folder_url: str, tmp_path: Path, open_shared: OpenShared) -> None:
    """With write access and no secret: keys do not tell objects' names, and made, moved or mixed objects are not used."""
    written(open_shared("owner", folder_url))
    owner, attacker = ObjectFormat(SECRET.encode()), ObjectFormat(None)
    key, kv = CHUNKS[0]
    names = {path.name for path in (tmp_path / "objects").rglob("*") if path.is_file()}
    assert names == {owner.name(each.digest) for each in KEYS}
    assert (tmp_path / "objects").stat().st_mode & 0o777 == 0o700
    assert not names & {each.digest for each in KEYS}
    path = path_of(tmp_path, owner.name(key.digest))
    mine, others = path.read_bytes(), path_of(tmp_path, owner.name(KEYS[1].digest)).read_bytes()
    zeros = ChunkKV([(torch.zeros_like(k), torch.zeros_like(v)) for k, v in kv.layers], kv.token_ids, kv.prefix_ids, kv.model)
    poison = EncodedEntry.from_chunk(key, zeros)
    bare = attacker.pack(poison)
    for forged in (bare, ObjectFormat(b"a guessed secret").pack(poison), others, mine[:40] + bare, mine[:-100] + bare[-100:]):
        path.write_bytes(forged)
        with pytest.raises(DamagedEntryError):
            owner.unpack(key.digest, np.frombuffer(forged, np.uint8))
    assert open_shared("victim", folder_url).fetch([key], LONG_S) == 0
    path.write_bytes(mine)  # what was written can be put back: that is all
    assert open_shared("last", folder_url).fetch([key], LONG_S) == 1


def test_a_header_of_another_key_is_damaged() -> None:
    """Without a secret too, an object whose header names other tokens or another namespace than its key is damaged."""
    _, kv = CHUNKS[0]
    mine = ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=MODEL, namespace="mine")
    lie = EncodedEntry.from_chunk(ChunkKey(mine.digest, MODEL, "raw", "yours"), ChunkKV(kv.layers, kv.token_ids, kv.prefix_ids))
    other = EncodedEntry.from_chunk(mine, ChunkKV(kv.layers, [9, *kv.token_ids[1:]], kv.prefix_ids))
    for entry in (lie, other):
        with pytest.raises(DamagedEntryError, match="other tokens"):
            unpacked(mine, ObjectFormat(None).pack(entry))


@pytest.mark.parametrize(
    "lie", [{"namespace": "\ud800"}, {"model": "\ud800"}, {"key": "\ud800"}, {"heads": [[2, 4.0]] * 3}, {"heads": [[2, 9]] * 3}]
)
def test_a_header_that_makes_no_sense_is_damaged(lie: dict[str, object]) -> None:
    """Headers with a right checksum, and names that are not Unicode or sizes that are not the object's, are damaged."""
    key, kv = CHUNKS[0]
    good = ObjectFormat(None).pack(EncodedEntry.from_chunk(key, kv))
    end = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:end])
    text = json.dumps(json.loads(header["__metadata__"]["entry"]) | lie)
    header["__metadata__"] = {"entry": text, "entry_xxh3": xxhash.xxh3_64_hexdigest(text.encode())}
    raw = json.dumps(header).encode()
    with pytest.raises(DamagedEntryError):
        unpacked(key, good[:8] + raw.ljust(end - 8) + good[end:])


def test_a_long_header_is_not_parsed() -> None:
    """A header of more than a MiB is refused before it is parsed: without a secret anybody may have written it."""
    raw = b"[]," * (MAX_HEADER_BYTES // 3 + 1)
    with pytest.raises(DamagedEntryError, match="header of"):
        unpacked(KEYS[0], len(raw).to_bytes(8, "little") + raw)


def unpacked(key: ChunkKey, data: bytes) -> EncodedEntry:
    return ObjectFormat(None).unpack(key.digest, np.frombuffer(data, np.uint8))


def test_an_object_that_is_too_large_is_not_read(folder_url: str, tmp_path: Path, open_shared: OpenShared) -> None:
    """An object larger than the NVMe budget is damaged, whatever it holds."""
    store = open_shared("a", folder_url, nvme_budget_bytes=2**20)
    path = path_of(tmp_path, ObjectFormat(SECRET.encode()).name(KEYS[0].digest))
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2**20 + 1))
    assert store.fetch(KEYS[:1], LONG_S) == 0
    assert stats_of(store).damaged == 1


SECRETS = st.none() | st.binary(min_size=16)
TENANTS = st.sampled_from([None, "a", "b"])
NAMESPACES = st.sampled_from(["", "a", "b", "a\0b"])


@given(secrets=st.tuples(SECRETS, SECRETS), tenants=st.tuples(TENANTS, TENANTS), namespaces=st.tuples(NAMESPACES, NAMESPACES))
@settings(max_examples=100, deadline=None)
def test_names_are_equal_for_equal_keys_tenants_and_secrets_only(
    secrets: tuple[bytes | None, bytes | None], tenants: tuple[str | None, str | None], namespaces: tuple[str, str]
) -> None:
    """An object's name follows from tenant, namespace, text and secret, and differs if one of them does."""
    keys = [ChunkKey.of([1, 2, 3], model=MODEL, namespace=namespace) for namespace in namespaces]
    one, two = (
        ObjectFormat(secret, tenant).name(key.digest) for secret, tenant, key in zip(secrets, tenants, keys, strict=True)
    )
    assert (one == two) == (secrets[0] == secrets[1] and tenants[0] == tenants[1] and namespaces[0] == namespaces[1])


@pytest.mark.parametrize("secret", [None, SECRET])
def test_tenants_share_nothing(folder_url: str, open_shared: OpenShared, secret: str | None) -> None:
    """A tenant neither fetches nor deletes another's entries, equal ones included; its own stores share all."""
    for tenant in "ab":
        written(open_shared(tenant, folder_url, remote_secret=secret, remote_tenant=tenant))
    deletes = open_shared("a2", folder_url, remote_secret=secret, remote_tenant="a")
    assert deletes.fetch(KEYS[:1], LONG_S) == 1
    for key in KEYS:
        deletes.delete(key)
    assert deletes.flush_remote(LONG_S)
    found = {tenant: open_shared(f"{tenant}3", folder_url, remote_secret=secret, remote_tenant=tenant) for tenant in "abc"}
    assert {tenant: store.fetch(KEYS, LONG_S) for tenant, store in found.items()} == {"a": 0, "b": 4, "c": 0}


class FakeBackend:
    """A `Backend` in a dict, which fails while `is_down`, and answers while `may_answer` is set."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls = list[str]()
        self.is_down = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _call(self, what: str) -> None:
        self.calls.append(what)
        assert self.may_answer.wait(LONG_S)
        if self.is_down:
            raise OSError("redis://user:password@host is down")

    def get(self, name: str) -> Bytes | None:
        self._call("get")
        data = self.objects.get(name)
        return None if data is None else np.frombuffer(data, np.uint8)

    def put(self, name: str, data: bytes) -> None:
        self._call("put")
        self.objects[name] = data

    def contains(self, name: str) -> bool:
        self._call("contains")
        return name in self.objects

    def delete(self, name: str) -> None:
        self._call("delete")
        self.objects.pop(name, None)

    def close(self) -> None:
        self.calls.append("close")


ENTRIES = [EncodedEntry.from_chunk(key, kv) for key, kv in CHUNKS]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def tier(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteTier]:
    """A tier over the backend, whose queue has room for three changes."""
    monkeypatch.setattr(remote, "MAX_CHANGES", 3)
    monkeypatch.setattr(remote, "MAX_TRANSFER_S", 20.0)
    tier = RemoteTier(RemoteAddress("redis://host"), backend, ObjectFormat(None), 0.2)
    yield tier
    backend.may_answer.set()
    tier.close()


def test_the_last_change_counts(backend: FakeBackend, tier: RemoteTier) -> None:
    """Changes of an entry that wait are one: the last; those beyond the queue are dropped and counted.

    Deletions are made first; what is gone by then is not sent.
    """
    backend.may_answer.clear()
    tier.put(KEYS[0].digest, lambda: ENTRIES[0])
    wait_until(lambda: backend.calls == ["put"])
    tier.put(KEYS[1].digest, lambda: None)
    for load in (lambda: ENTRIES[2], None):
        tier.put(KEYS[2].digest, load)
    tier.put(KEYS[3].digest, lambda: ENTRIES[3])
    assert (tier.stats().pending_writes, tier.stats().dropped_writes) == (3, 1)
    assert tier.fetch([KEYS[2].digest], lambda _: True, LONG_S) == []
    backend.may_answer.set()
    assert tier.flush(LONG_S)
    assert backend.calls == ["put", "delete"]
    assert (set(backend.objects), tier.stats().dropped_writes) == ({KEYS[0].digest}, 2)


def test_an_entry_is_fetched_once_for_all_who_wait(backend: FakeBackend, tier: RemoteTier) -> None:
    """Requests for an entry that is on its way wait for the same call; one for which nobody waits any more is not fetched."""
    stored = list[EncodedEntry]()
    tier.send(ENTRIES[0])
    backend.may_answer.clear()
    arrivals = [tier.fetch([KEYS[0].digest], lambda entry: not stored.append(entry), LONG_S)[0] for _ in range(3)]
    late = tier.fetch([f"{number:064x}" for number in range(2 * remote.FETCHES)], lambda _: True, 0.0)
    backend.may_answer.set()
    assert [arrival.result(LONG_S) for arrival in arrivals] == [True] * 3
    assert [arrival.result(LONG_S) for arrival in late] == [False] * len(late)
    assert (len(backend.calls) <= 1 + remote.FETCHES, len(stored)) == (True, 1)


def test_changes_wait_for_the_end_of_an_outage(backend: FakeBackend, tier: RemoteTier) -> None:
    """Changes during an outage are tried again after the breaker's pause, in order; messages show no password."""
    backend.is_down = True
    with pytest.raises(RemoteError) as refused:
        tier.send(ENTRIES[0])
    assert "password" not in str(refused.value)
    tier.put(KEYS[1].digest, lambda: ENTRIES[1])
    wait_until(lambda: backend.calls.count("put") > 1)
    backend.is_down = False
    assert tier.flush(LONG_S)
    assert list(backend.objects) == [KEYS[1].digest]


def test_a_closed_tier_neither_fetches_nor_sends(backend: FakeBackend, tier: RemoteTier) -> None:
    """After the end nothing is asked; changes that could not be sent are counted, and none is a removal that may be made."""
    backend.objects[KEYS[2].digest] = b""
    put = Mock(side_effect=OSError("full"))
    backend.put = put  # type: ignore[method-assign]
    for key in KEYS[:2]:
        tier.put(key.digest, lambda: ENTRIES[0])
    wait_until(lambda: put.call_count >= FAILURES)
    tier.put(KEYS[2].digest, None)
    tier.close()
    assert (tier.stats().dropped_writes, backend.objects) == (2, {})
    assert tier.fetch([KEYS[0].digest], lambda _: True, LONG_S) == []
    assert tier.contains([KEYS[0].digest]) == set()


def test_a_closing_tier_sends_what_waits(backend: FakeBackend, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the remote answers, also where a change is refused once, so that it needs more than the time-out."""
    delete = Mock(side_effect=[OSError("slow down"), None, None, None])
    monkeypatch.setattr(backend, "delete", delete)
    for number in range(3):
        tier.put(f"{number:064x}", None)
    tier.close()
    assert (delete.call_count, tier.stats().dropped_writes) == (4, 0)


def test_the_breaker_opens_and_doubles_its_pause() -> None:
    """Calls stop after failures in a row, for a pause that doubles with each failure after a pause, up to a minute."""
    now = 100.0
    breaker = CircuitBreaker(lambda: now)
    assert [breaker.fail() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert breaker.fail() is False  # a call that began before the pause
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert breaker.pause_left_s() == pause_s
        now += pause_s
        assert breaker.pause_left_s() == 0
        breaker.fail()
    breaker.succeed()
    assert (breaker.pause_left_s(), breaker.fail()) == (0, False)


@pytest.mark.parametrize("bad", ["http://host", "redis://", "file://host/folder", "file:///a?b", "s3://", 7])
def test_bad_addresses_are_refused_unseen(bad: object) -> None:
    """A URL of another kind is refused, and not shown."""
    with pytest.raises(ConfigError, match="not shown"):
        StoreConfig(remote=bad)


def test_no_text_shows_a_password() -> None:
    """An address shows neither user nor password nor query."""
    address = RemoteAddress("redis://me:hidden@host:1/0?password=hidden")
    assert address.shown == "redis://host:1/0"
    assert "hidden" not in repr(address) + repr(StoreConfig(remote=address.url))
