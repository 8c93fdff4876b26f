"""Removals that the remote tier was not told of: they outlive the process, and are made at the next opening."""

from pathlib import Path

import pytest
from chunks import make_chunk
from remote_servers import OpenShared, RedisServer, remote_of
from waiting import wait_until

from cacheblend.base.errors import RemoteError, StoreFullError
from cacheblend.store import KVStore
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
