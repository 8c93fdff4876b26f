"""Writes in the background: readable at once, durable after `flush`, each with a result of its own."""

import threading
from unittest.mock import Mock

import pytest
from chunks import FILE_BYTES, MODEL, RAM_BYTES, files_under, make_chunk, put_all, same

from cacheblend.base.errors import StoreFullError
from cacheblend.store import ChunkKey
from cacheblend.store.catalog import Catalog
from cacheblend.store.entry_file import write_files

PAIRS = [make_chunk(seed) for seed in range(8)]


def test_readable_at_once_and_durable_after_flush(open_store) -> None:
    """An entry that waits is got, found and counted; after `flush` it is on NVMe."""
    store = open_store(ram_budget_bytes=1)
    with store.exclusive():  # holds the background's writer up
        put_all(store, PAIRS, flush=False)
        assert all(same(store.get(key), kv) for key, kv in PAIRS)
        assert all(key in store for key, _ in PAIRS)
        stats = store.stats()
        assert (stats.pending_writes, stats.pending_bytes, stats.nvme.entries) == (8, 8 * RAM_BYTES, 0)
    store.flush()
    stats = store.stats()
    assert (stats.pending_writes, stats.pending_bytes, stats.nvme.entries) == (0, 0, 8)
    with open_store() as again:
        assert all(same(again.get(key), kv) for key, kv in PAIRS)


def test_the_queue_is_bounded(open_store) -> None:
    """A put blocks while more bytes wait than the queue may hold; closing loses nothing that was put."""
    store = open_store(write_queue_bytes=2 * RAM_BYTES)
    with store.exclusive():
        put_all(store, PAIRS[:2], flush=False)
        third = threading.Thread(target=lambda: store.put(*PAIRS[2], flush=False))
        third.start()
        third.join(0.05)
        assert third.is_alive()
    third.join()
    store.close()
    assert open_store().stats().nvme.entries == 3


def test_a_synchronous_put_of_what_waits(open_store) -> None:
    """Putting a waiting entry with `flush` returns when it is durable."""
    store = open_store()
    with store.exclusive():
        store.put(*PAIRS[0], flush=False)
        store.put(*PAIRS[0])
        assert store.stats().nvme.entries == 1
    store.flush()
    assert store.stats().nvme.entries == 1


def test_what_waits_is_written_together(open_store, monkeypatch) -> None:
    """Entries that wait share a commit, 64 at most, whatever their namespaces."""
    commits = []
    change = Catalog.change

    def counting(catalog, *, add=(), **options) -> None:
        commits.append(len(add))
        change(catalog, add=add, **options)

    monkeypatch.setattr(Catalog, "change", counting)
    store = open_store()
    other = ChunkKey.of(PAIRS[7][1].token_ids, prefix_ids=(1,), model=MODEL, namespace="other")
    with store.exclusive():
        store.put(other, PAIRS[7][1], flush=False)
        put_all(store, map(make_chunk, range(65)), flush=False)
    store.flush()
    assert commits == [64, 2]
    assert store.stats().nvme.entries == 66


def test_what_has_no_room_together_is_written_one_by_one(open_store) -> None:
    """A group larger than the budget is no error: the last ones stay, as if each had been put alone."""
    store = open_store(nvme_budget_bytes=2 * FILE_BYTES)
    with store.exclusive():
        put_all(store, PAIRS[:5], flush=False)
    store.flush()
    assert [key in store for key, _ in PAIRS[:5]] == [False, False, False, True, True]
    assert store.stats().failed_writes == 0
    assert store.verify().ok


def test_one_of_a_group_cannot_be_written(open_store, monkeypatch, caplog) -> None:
    """What fails is logged, counted, told to who put it, and a miss; it takes no other entry of its group with it."""
    store = open_store()
    bad = str(PAIRS[1][0])

    def failing(files) -> None:
        if any(file.final.name == bad for file in files):
            raise StoreFullError("no room for this one")
        write_files(files)

    with monkeypatch.context() as patch:
        patch.setattr("cacheblend.store.nvme_tier.write_files", failing)
        with store.exclusive():
            writes = [store.put(*pair, flush=False) for pair in PAIRS[:3]]
        store.flush()
    assert [write.exception() is None for write in writes] == [True, False, True]
    with pytest.raises(StoreFullError, match="no room for this one"):
        writes[1].result()
    assert f"{bad} was not written: no room for this one" in caplog.text
    stats = store.stats()
    assert (stats.failed_writes, stats.pending_writes, stats.nvme.entries, stats.ram.entries) == (1, 0, 2, 2)
    assert [store.get(key) is not None for key, _ in PAIRS[:3]] == [True, False, True]
    assert store.put(*PAIRS[1], flush=False).result()
    assert same(store.get(PAIRS[1][0]), PAIRS[1][1])


def test_deleted_before_it_is_written(open_store) -> None:
    """An entry that is deleted while it waits is never written."""
    store = open_store()
    with store.exclusive():
        writes = [store.put(*pair, flush=False) for pair in PAIRS[:3]]
        assert store.delete(PAIRS[1][0])
    assert [write.result() for write in writes] == [True, False, True]
    assert store.get(PAIRS[1][0]) is None
    assert files_under(store, "entries") == sorted(str(PAIRS[seed][0]) for seed in (0, 2))


def test_closing_after_a_failed_write(open_store, caplog) -> None:
    """A store that could not write an entry closes all the same: who put it is told, and the entry is a miss."""
    store = open_store(nvme_budget_bytes=FILE_BYTES)
    store.put(*PAIRS[0])
    with store.pin([PAIRS[0][0]]):
        write = store.put(*PAIRS[1], flush=False)
        store.close()
    with pytest.raises(StoreFullError):
        write.result()
    assert str(PAIRS[1][0]) in caplog.text
    assert open_store().get(PAIRS[1][0]) is None


def test_closing_on_a_full_disk(open_store, monkeypatch, caplog) -> None:
    """Where the times of use cannot be written at the end, the store is closed with a warning."""
    store = open_store()
    store.put(*PAIRS[0])
    store.get(PAIRS[0][0])
    monkeypatch.setattr(Catalog, "save_uses", Mock(side_effect=StoreFullError("no room")))
    store.close()
    assert "times of use" in caplog.text


def test_a_folder_that_is_gone_fails_every_entry_of_a_group(open_store, monkeypatch) -> None:
    """An error that is of no single entry is told to all that were to be written together."""
    store = open_store()
    with store.exclusive():
        writes = [store.put(*pair, flush=False) for pair in PAIRS[:3]]
        monkeypatch.setattr(store._queue, "group", lambda: 1 / 0)
    store.flush()
    assert all(isinstance(write.exception(), ZeroDivisionError) for write in writes)
    assert store.stats().pending_writes == 0
