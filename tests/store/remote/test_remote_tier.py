"""The remote tier on real servers: what one store writes, every store that shares it reads, on each backend alike."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
import torch
from chunks import FILE_BYTES, file_of, make_chunk, same
from remote_servers import SECRET, OpenShared, RedisServer, remote_of
from waiting import WAIT_S, wait_until

from cacheblend.base.errors import ConfigError, EvictedEntryError, MissingExtraError, RemoteError
from cacheblend.base.threads import DaemonThreads
from cacheblend.store import KVStore, StoreConfig
from cacheblend.store.remote.address import RemoteAddress
from cacheblend.store.remote.backend import BackendLimits, ObjectRange
from cacheblend.store.remote.remote_tier import LOAD_ENTRIES
from cacheblend.store.remote.transfer import list_entries, pull, push

CHUNKS = [make_chunk(seed) for seed in range(1, 5)]
KEYS = [key for key, _ in CHUNKS]


def written(store: KVStore) -> KVStore:
    """The store, with the chunks in it and in its remote tier."""
    for key, kv in CHUNKS:
        store.put(key, kv)
    assert store.flush_remote(10)
    return store


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_one_replica_writes_another_reads(url: str, secret: str | None, open_shared: OpenShared) -> None:
    """Chunks put at one replica are hits at another, bit for bit, by `get` and by every layer of a placement."""
    written(open_shared("a", url, remote_secret=secret))
    other = open_shared("b", url, remote_secret=secret)
    assert same(other.get(KEYS[0]), CHUNKS[0][1])
    with other.pin(KEYS[1:]) as placements:
        for placement, (_, kv) in zip(placements, CHUNKS[1:], strict=True):
            assert placement is not None
            assert placement.tier == "remote"
            for layer, pair in enumerate(kv.layers):
                assert all(map(torch.equal, placement.read_layer(layer), pair))
    remote = other.stats().remote
    assert remote is not None
    assert (remote.hits, remote.failures, remote.damaged) == (4, 0, 0)


def test_what_was_read_comes_to_nvme_and_ram(url: str, open_shared: OpenShared) -> None:
    """Entries that a request read from the remote tier are files here afterwards, layers that nobody read included."""
    written(open_shared("a", url))
    other = open_shared("b", url)
    with other.pin(KEYS) as placements:
        assert placements[0] is not None
        placements[0].read_layer(1)
    other.flush()
    assert [key in other for key in KEYS] == [True] * 4
    with other.pin(KEYS) as placements:
        assert [placement and placement.tier for placement in placements] == ["ram"] * 4
    assert other.verify().ok
    assert all(same(other.get(key), kv) for key, kv in CHUNKS)


def test_a_full_nvme_takes_what_comes_twice(url: str, open_shared: OpenShared) -> None:
    """A replica whose disk is full copies an entry at its second use, and reads it remotely until then."""
    written(open_shared("a", url))
    small = open_shared("b", url, nvme_budget_bytes=FILE_BYTES + 100, ram_budget_bytes=1)
    assert small.fetch(KEYS[:1]) == 1
    assert same(small.get(KEYS[1]), CHUNKS[1][1])
    small.flush()
    assert KEYS[1] not in small
    assert same(small.get(KEYS[1]), CHUNKS[1][1])
    small.flush()
    assert KEYS[1] in small


def test_an_object_is_the_file(url: str, open_shared: OpenShared) -> None:
    """Without a secret an object has the very bytes of the entry's file on NVMe; with one, a seal stands before them."""
    for secret, name in ((None, "a"), (SECRET, "b")):
        store = written(open_shared(name, url, remote_secret=secret))
        remote = remote_of(store)
        file = file_of(store, KEYS[0]).read_bytes()
        with remote.reader() as reader:
            reader.request([ObjectRange(remote.format.name(KEYS[0].digest), 0, 2**20)])
            found = reader.receive()
        assert found is not None
        assert found.tobytes()[-len(file) :] == file
        assert len(found) - len(file) == (0 if secret is None else 4096)


def test_delete_at_one_is_a_miss_at_the_other(url: str, open_shared: OpenShared) -> None:
    """A deleted entry is no hit anywhere: not here while the remote is not told yet, and not at others afterwards."""
    one = written(open_shared("a", url))
    one.delete(KEYS[0])
    assert one.get(KEYS[0]) is None
    assert one.flush_remote(10)
    other = open_shared("b", url)
    assert other.get(KEYS[0]) is None
    assert other.get(KEYS[1]) is not None
    one.put(*CHUNKS[0])
    assert one.flush_remote(10)
    assert open_shared("c", url).get(KEYS[0]) is not None


def test_push_and_pull_carry_a_whole_store(url: str, open_shared: OpenShared, tmp_path: Path) -> None:
    """`push` sends what the remote tier lacks, `pull` brings what the store lacks, and both count what is there already."""
    with KVStore(StoreConfig(directory=tmp_path / "a")) as local:
        for key, kv in CHUNKS:
            local.put(key, kv)
    one = open_shared("a", url, remote_secret=SECRET)
    assert (push(one, remote_of(one)).entries, push(one, remote_of(one)).already_there) == (4, 4)
    other = open_shared("b", url, remote_secret=SECRET)
    other.put(*CHUNKS[0])
    assert other.flush_remote(10)
    report = pull(other, remote_of(other))
    assert (report.entries, report.already_there, report.refused) == (3, 1, 0)
    assert other.verify().ok
    assert {str(key) for key in KEYS} == {str(entry.info.key) for _, _, entry in list_entries(remote_of(other)) if entry}
    foreign = open_shared("c", url, remote_secret="another deployment")
    assert pull(foreign, remote_of(foreign)).refused == 4


def test_fetch_brings_what_is_there_alone(url: str, open_shared: OpenShared) -> None:
    """`fetch` makes remote entries durable here, and leaves what the remote tier has not."""
    one = open_shared("a", url)
    one.put(*CHUNKS[0])
    assert one.flush_remote(10)
    other = open_shared("b", url)
    assert other.fetch(KEYS) == 1
    assert [key in other for key in KEYS] == [True, False, False, False]
    assert remote_of(other).contains([key.digest for key in KEYS]) == {KEYS[0].digest}


def test_an_entry_that_goes_between_look_up_and_read_is_a_miss(url: str, open_shared: OpenShared) -> None:
    """What the server evicts after the look-up is no damage: the read says so, and the next look-up misses it."""
    written(open_shared("a", url))
    other = open_shared("b", url)
    with other.pin(KEYS[:1]) as (placement,):
        assert placement is not None
        remote_of(other).backend.delete([remote_of(other).format.name(KEYS[0].digest)])
        with pytest.raises(EvictedEntryError):
            placement.read_layer(1)
    other.flush()
    assert other.get(KEYS[0]) is None
    stats = other.stats().remote
    assert stats is not None
    assert stats.damaged == 0


def test_ttl_and_eviction_are_misses(redis_server: RedisServer, open_shared: OpenShared) -> None:
    """What Redis dropped, by TTL here, is missing and no error."""
    url = f"{redis_server.url}?db=0"
    store = open_shared("a", url, remote_ttl_s=1)
    store.put(*CHUNKS[0])
    assert store.flush_remote(10)
    other = remote_of(open_shared("b", url))
    assert other.contains([KEYS[0].digest])
    wait_until(lambda: not other.contains([KEYS[0].digest]))
    assert open_shared("c", url).get(KEYS[0]) is None


def test_long_headers_take_a_second_read(url: str, open_shared: OpenShared) -> None:
    """An entry whose header is longer than what is read first is found as others are."""
    from cacheblend.store import ChunkKey, ChunkKV

    ids = list(range(10**6, 10**6 + 5000))
    pair = torch.randn(1, 5000, 2), torch.randn(1, 5000, 2)
    key, kv = ChunkKey.of(ids, model="m"), ChunkKV([pair, pair], ids, (), "m")
    store = open_shared("a", url)
    store.put(key, kv)
    assert store.flush_remote(10)
    assert same(open_shared("b", url).get(key), kv)


def test_looking_many_entries_up_takes_a_time_out_at_most(
    open_shared: OpenShared, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of entries whose round trips take longer together than the time-out, those are found that were looked up within it."""
    remote = remote_of(open_shared("a", redis_server.url, remote_timeout_s=10))
    now, digests = time.monotonic(), [f"{number:064x}" for number in range(10 * LOAD_ENTRIES)]

    def sizes(names: Sequence[str]) -> list[int]:
        nonlocal now
        now += 4.0
        return [1] * len(names)

    monkeypatch.setattr(remote.backend, "sizes", sizes)
    monkeypatch.setattr("cacheblend.store.remote.remote_tier.time", SimpleNamespace(monotonic=lambda: now))
    assert remote.contains(digests) == set(digests[: 2 * LOAD_ENTRIES])
    assert remote.stats().failures == 0


def test_write_behind_is_bounded(redis_server: RedisServer, open_shared: OpenShared) -> None:
    """What finds no room among the entries that wait is not sent, counted, and sent by `push`."""
    store = open_shared("a", f"{redis_server.url}?db=15", remote_queue_bytes=1)
    store.put(*CHUNKS[0])
    stats = store.stats().remote
    assert stats is not None
    assert (stats.dropped_writes, stats.sent) == (1, 0)
    assert push(store, remote_of(store)).entries == 1


def test_no_text_shows_the_secrets(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Neither the configuration's text, nor its errors, nor logs have a URL's password or the deployment's secret."""
    url = "redis://user:hunter2@127.0.0.1:1/0?password=hunter3"
    config = StoreConfig(directory=tmp_path, remote=url, remote_secret=SECRET, remote_timeout_s=0.2)
    shown = [repr(config), str(config.remote_address()), repr(config.remote_address())]
    with caplog.at_level("DEBUG"), KVStore(config) as store:
        for key, kv in CHUNKS:
            store.put(key, kv)
            store.get(make_chunk(99)[0])
        wait_until(lambda: remote_of(store).writes.state != "closed")
    shown += [record.getMessage() for record in caplog.records]
    for bad in ({"remote": "http://user:hunter2@host"}, {"remote_secret": "hunter2"}):
        with pytest.raises(ConfigError) as caught:
            StoreConfig(**bad)  # type: ignore[arg-type]
        shown.append(str(caught.value))
    assert len(shown) > 5
    assert not any("hunter" in text or SECRET in text for text in shown)


@pytest.mark.parametrize("name", ["my kv", "kv#2", "kv?2", "50%"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str, open_shared: OpenShared) -> None:
    """A percent-encoded folder is taken by its name; one in which "#" or "?" would end the path is refused, with what to do."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    written(open_shared("a", f"file://{tmp_path}/{quote(name)}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a", name])
    if "#" in name or "?" in name:
        with pytest.raises(ConfigError, match="percent-encode"):
            RemoteAddress(f"file://{tmp_path}/{name}")


@pytest.mark.parametrize("password", ["hun/ter2", "hun?ter2", "hun#ter2", "hun@ter2", "hun[ter2"])
def test_a_password_that_is_not_encoded_is_refused_unseen(password: str) -> None:
    """A password with a character that ends a URL's host is refused, with what to do and nothing of it; encoded it is taken."""
    with pytest.raises(ConfigError, match="percent-encode") as caught:
        StoreConfig(remote=f"redis://me:{password}@host/0")
    assert "hun" not in str(caught.value)
    assert "ter2" not in str(caught.value)
    StoreConfig(remote=f"redis://me:{quote(password, safe='')}@host/0")


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    """A file holds the secret as well as a variable does; one that is missing, short, or given beside it is refused."""
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert StoreConfig(remote_secret_file=str(file)).read_secret() == StoreConfig(remote_secret=SECRET).read_secret()
    for options in ({"remote_secret_file": str(tmp_path / "none")}, {"remote_secret_file": str(file), "remote_secret": SECRET}):
        with pytest.raises(ConfigError):
            StoreConfig(**options)  # type: ignore[arg-type]


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis-py a Redis URL is refused with the extra to install, and the store's folder is left unlocked."""
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "cacheblend.store.remote.redis_backend", raising=False)
    with pytest.raises((MissingExtraError, ImportError)):
        KVStore(StoreConfig(directory=tmp_path, remote="redis://127.0.0.1:1"))
    with KVStore(StoreConfig(directory=tmp_path)) as store:
        assert store.stats().remote is None


def test_layers_of_many_chunks_come_over_one_stream_in_order(url: str, open_shared: OpenShared) -> None:
    """Layers are asked for ahead and come in the order asked, each checked when it is read."""
    written(open_shared("a", url))
    other = open_shared("b", url)
    with other.pin(KEYS) as placements:
        placed = [placement for placement in placements if placement is not None]
        assert placed[0].stream is not None
        stream = placed[0].stream()
        asked = [(placement, layer) for layer in (1, 2, 0) for placement in placed]
        stream.request(asked)
        for placement, layer in asked:
            received = stream.receive()
            kv = dict(zip(KEYS, (kv for _, kv in CHUNKS), strict=True))[placement.key]
            to_2HTB = np.empty((2, *kv.layers[layer][0].shape[:2], kv.layers[layer][0].shape[2] * 4), np.uint8)
            received.read_layer_into(layer, to_2HTB)
            assert to_2HTB.tobytes() == b"".join(x_HTD.numpy().tobytes() for x_HTD in kv.layers[layer])
        stream.close()


def test_a_store_that_is_open_when_the_process_ends_is_closed_without_errors(tmp_path: Path) -> None:
    """Who forgets to close a store on an object store is told nothing of its threads."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    code = f"""
from cacheblend.store import KVStore, StoreConfig
store = KVStore(StoreConfig(directory="{tmp_path}/store", remote="file://{tmp_path}/objects"))
assert store.remote.backend.sizes(["none"]) == [None]
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_who_waits_for_an_object_store_that_is_closed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a backend ends what is under way by an error, in the threads that wait for it; later calls get one too."""
    pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
    import obstore

    begun = threading.Event()

    async def never(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(obstore, "put_async", never)
    backend = RemoteAddress(f"file://{tmp_path}/objects").open(BackendLimits(timeout_s=60.0))
    put = DaemonThreads("put").call(lambda: backend.put("name", [np.zeros(1, np.uint8)]))
    assert begun.wait(WAIT_S)
    backend.close()
    with pytest.raises(RemoteError):
        put.result(WAIT_S)
    with pytest.raises(RemoteError):
        backend.sizes(["name"])
    backend.close()
