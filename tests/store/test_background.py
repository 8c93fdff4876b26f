"""Writes in the background: readable at once, durable after `flush`, failures raised there."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from chunks import FILE_BYTES, RAM_BYTES, files_under, make_chunk, same, wait_until

from cacheblend.store import StoreFullError

PAIRS = [make_chunk(seed) for seed in range(8)]


def test_readable_at_once_and_durable_after_flush(open_store) -> None:
    """An entry that waits is got, found and counted; after `flush` it is on NVMe."""
    store = open_store(ram_budget_bytes=1)
    with store._nvme.exclusive():  # holds the background's writer up
        for pair in PAIRS:
            store.put(*pair, flush=False)
        assert all(same(store.get(key), kv) for key, kv in PAIRS)
        assert all(key in store for key, _ in PAIRS)
        stats = store.stats()
        assert (stats.pending_writes, stats.pending_bytes, stats.nvme.entries) == (8, 8 * RAM_BYTES, 0)
    store.flush()
    stats = store.stats()
    assert (stats.pending_writes, stats.pending_bytes, stats.nvme.entries) == (0, 0, 8)
    with open_store() as again:
        assert all(same(again.get(key), kv) for key, kv in PAIRS)


def test_close_writes_what_waits(open_store) -> None:
    """Closing loses nothing that was put."""
    with open_store() as store:
        for pair in PAIRS:
            store.put(*pair, flush=False)
    with open_store() as store:
        assert all(same(store.get(key), kv) for key, kv in PAIRS)


def test_the_queue_is_bounded(open_store) -> None:
    """A put blocks while more bytes wait than the queue may hold."""
    store = open_store(queue_bytes=2 * RAM_BYTES)
    with store._nvme.exclusive():
        for pair in PAIRS[:2]:
            store.put(*pair, flush=False)
        third = threading.Thread(target=lambda: store.put(*PAIRS[2], flush=False))
        third.start()
        third.join(0.05)
        assert third.is_alive()
    third.join()
    store.flush()
    assert store.stats().nvme.entries == 3


def test_a_synchronous_put_of_what_waits(open_store) -> None:
    """Putting a waiting entry with `flush` returns when it is durable."""
    store = open_store()
    with store._nvme.exclusive():
        store.put(*PAIRS[0], flush=False)
        store.put(*PAIRS[0])
        assert store.stats().nvme.entries == 1
    store.flush()
    assert store.stats().nvme.entries == 1


def test_deleted_before_it_is_written(open_store) -> None:
    """An entry that is deleted while it waits is never written."""
    store = open_store()
    with store._nvme.exclusive():
        for pair in PAIRS[:3]:
            store.put(*pair, flush=False)
        assert store.delete(PAIRS[1][0])
    store.flush()
    assert store.get(PAIRS[1][0]) is None
    assert files_under(store, "entries") == sorted(str(PAIRS[seed][0]) for seed in (0, 2))


def test_failures_are_logged_counted_and_raised_by_flush(open_store, monkeypatch, caplog) -> None:
    """An entry that cannot be written in the background becomes a miss; `flush` raises the first error once."""
    store = open_store()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        store.put(*PAIRS[0], flush=False)
        store.put(*PAIRS[1], flush=False)
        with pytest.raises(StoreFullError, match="no room on the disk"):
            store.flush()
    assert "no room on the disk" in caplog.text
    store.flush()
    stats = store.stats()
    assert (stats.failed_writes, stats.pending_writes, stats.nvme.entries, stats.ram.entries) == (2, 0, 0, 0)
    assert store.get(PAIRS[0][0]) is None
    store.put(*PAIRS[0], flush=False)
    store.flush()
    assert same(store.get(PAIRS[0][0]), PAIRS[0][1])


def test_close_raises_what_the_background_met(open_store) -> None:
    """An error that nobody flushed is raised by `close`, and the store is closed all the same."""
    store = open_store(nvme_budget_bytes=FILE_BYTES)
    store.put(*PAIRS[0])
    with store.pin([PAIRS[0][0]]):
        store.put(*PAIRS[1], flush=False)
        with pytest.raises(StoreFullError):
            store.close()
    store.close()


def test_the_blocks_own_error_comes_first(open_store) -> None:
    """When a `with` block fails, its error is raised, not the background's."""

    def fail() -> None:
        with open_store(nvme_budget_bytes=FILE_BYTES) as store:
            store.put(*PAIRS[0])
            with store.pin([PAIRS[0][0]]):
                store.put(*PAIRS[1], flush=False)
                wait_until(lambda: store.stats().failed_writes == 1)
            raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        fail()
