"""Removals that the remote tier was not told of: they outlive the process, and are made at the next opening."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from chunks import make_chunk
from remote_servers import OpenShared, RedisServer, remote_of
from waiting import WAIT_S, wait_until

from cacheblend.base.errors import RemoteError, StoreFullError
from cacheblend.store import KVStore
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.remote.removal_log import RemovalLog

KEY, KV = make_chunk(1)
TIMEOUT_S = 0.2


def open_one(open_shared: OpenShared, server: RedisServer, name: str = "a") -> KVStore:
    return open_shared(name, server.url, remote_timeout_s=TIMEOUT_S)


def is_there(store: KVStore) -> bool:
    """Whether the remote tier itself has the entry's object."""
    remote = remote_of(store)
    return remote.backend.sizes([remote.format.name(KEY.digest)]) != [None]


def delete_unheard(open_shared: OpenShared, server: RedisServer) -> None:
    """Delete an entry that is in the remote tier while that refuses, and end the process's store."""
    store = open_one(open_shared, server)
    store.put(KEY, KV)
    assert store.flush_remote(10)
    assert is_there(store)

    def refuse(_: object) -> None:
        raise RemoteError("read only")

    remote_of(store).backend.delete = refuse  # type: ignore[method-assign]  # of this one
    store.delete(KEY)
    store.close()


def test_a_removal_outlives_the_process(own_redis: RedisServer, open_shared: OpenShared) -> None:
    """What was deleted while the remote was away goes from it when the store is opened next, and is a miss at once."""
    delete_unheard(open_shared, own_redis)
    assert is_there(open_one(open_shared, own_redis, "other"))
    again = open_one(open_shared, own_redis)
    assert again.get(KEY) is None
    wait_until(lambda: not is_there(again))
    assert again.flush_remote(10)
    again.close()
    assert remote_of(third := open_one(open_shared, own_redis)).uploads.size() == (0, 0)
    assert third.get(KEY) is None


def test_what_is_stored_again_stays(own_redis: RedisServer, open_shared: OpenShared) -> None:
    """An entry that is put after its removal is sent, and no removal of the past takes it away."""
    delete_unheard(open_shared, own_redis)
    again = open_one(open_shared, own_redis)
    again.put(KEY, KV)
    assert again.flush_remote(10)
    again.close()
    third = open_one(open_shared, own_redis)
    assert third.flush_remote(10)
    assert is_there(third)
    assert open_one(open_shared, own_redis, "other").get(KEY) is not None


@pytest.mark.parametrize("way", ["pin", "get", "fetch"])
@pytest.mark.parametrize("remove", ["delete", "clear"])
def test_a_copy_that_waits_does_not_bring_a_deleted_entry_back(
    own_redis: RedisServer, open_shared: OpenShared, way: str, remove: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from the remote tier and deleted before its copy is written is not written, though the remote was told."""
    with open_one(open_shared, own_redis, "writer") as writer:
        writer.put(KEY, KV)
        assert writer.flush_remote(10)
    store = open_one(open_shared, own_redis)

    def delete() -> None:
        if remove == "delete":
            store.delete(KEY)
            assert remote_of(store).uploads.flush(WAIT_S)
        else:
            store.clear()

    if way == "pin":
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            delete()
    elif way == "get":
        loading, go_on = threading.Event(), threading.Event()
        store_copy = store._remote._store  # type: ignore[union-attr]  # it has one

        def held(entry: EncodedEntry, since: int) -> None:
            loading.set()
            go_on.wait(WAIT_S)
            store_copy(entry, since)

        monkeypatch.setattr(store._remote, "_store", held)
        assert store.get(KEY) is not None
        assert loading.wait(WAIT_S)
        delete()
        go_on.set()
    else:
        remote = remote_of(store)
        load_all = remote.load_all

        def read_then_delete(digests: Sequence[str]) -> Iterator[EncodedEntry]:
            for entry in load_all(digests):
                delete()
                yield entry

        monkeypatch.setattr(remote, "load_all", read_then_delete)
        assert store.fetch([KEY]) == 0
    store.flush()
    assert KEY not in store


def test_a_deletion_needs_no_room(
    own_redis: RedisServer, open_shared: OpenShared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk a removal is made all the same, and a line says that it would not outlive the process."""
    store = open_one(open_shared, own_redis)
    store.put(KEY, KV)
    assert store.flush_remote(10)

    class FullDisk:
        def transaction(self) -> None:
            raise StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(remote_of(store).uploads._removals, "_database", FullDisk())
        store.delete(KEY)
    wait_until(lambda: not is_there(store))
    assert "not noted on disk: no room" in caplog.text


def test_a_damaged_file_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of other bytes costs the removals in it, and no start."""
    path = tmp_path / "removals"
    path.write_bytes(b"no database at all" * 100)
    log = RemovalLog(path)
    assert log.waiting() == []
    assert "are lost" in caplog.text
    log.note(["a", "b"])
    log.settle(["b", "c"])
    log.close()
    log.close()
    again = RemovalLog(path)
    assert again.waiting() == ["a"]
    again.close()
