"""The store gives back what was put, or nothing."""

from __future__ import annotations

import json
import time
import weakref
from pathlib import Path

import pytest
import torch
from chunks import FILE_BYTES, MODEL, RAM_BYTES, file_of, files_under, make_chunk, same

from cacheblend.store import ChunkKey, ChunkKV, InputError, KVStore, StoreConfig, StoreError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip(open_store, dtype: torch.dtype) -> None:
    """What is put is got bit for bit, from RAM and, after reopening, from NVMe."""
    key, kv = make_chunk(1, dtype)
    with open_store() as store:
        store.put(key, kv)
        assert same(store.get(key), kv)
        assert store.stats().ram.hits == 1
    with open_store() as store:
        assert key in store
        assert same(store.get(key), kv)
        assert store.stats().nvme.hits == 1
        assert same(store.get(key), kv)
        assert store.stats().ram.hits == 1


def test_miss(open_store) -> None:
    """A key that was never put is None, not in the store, and counted."""
    store = open_store()
    key, _ = make_chunk(1)
    assert store.get(key) is None
    assert key not in store
    with store.pin([key]) as placements:
        assert placements == [None]
    assert store.stats().misses == 2


def test_what_callers_do_to_their_tensors(open_store) -> None:
    """Neither the tensors that were put nor the ones that were got are the store's own."""
    key, kv = make_chunk(1)
    _, original = make_chunk(1)
    with open_store() as store:
        store.put(key, kv)
        kv.layers[0][0].zero_()
        store.get(key).layers[1][1].zero_()
        assert same(store.get(key), original)
    with open_store() as store:
        store.get(key).layers[0][0].zero_()
        assert same(store.get(key), original)


def test_put_twice(open_store) -> None:
    """Putting a key again writes nothing and counts as a use."""
    store = open_store()
    (one, kv), (other, other_kv) = make_chunk(1), make_chunk(2)
    store.put(one, kv)
    store.put(other, other_kv)
    written = file_of(store, one).stat()
    store.put(one, kv)
    store.put(one, kv, flush=False)
    assert file_of(store, one).stat().st_mtime_ns == written.st_mtime_ns
    assert [row.key for row in store.ls()] == [other, one]
    assert store.stats().pending_writes == 0


@pytest.mark.parametrize("wrong", ["model", "prefix", "context", "text"])
def test_kv_of_another_key(open_store, wrong: str) -> None:
    """KV of another model, prefix, context or text than the key's is refused, and nothing is stored."""
    _, kv = make_chunk(1)
    fields = {"prefix_ids": kv.prefix_ids, "model": MODEL}
    others = {"model": {"model": "other"}, "prefix": {"prefix_ids": (9,)}, "context": {"context": "other"}, "text": {}}
    fields |= others[wrong]
    key = ChunkKey.of([5] if wrong == "text" else kv.token_ids, **fields)
    store = open_store()
    with pytest.raises(InputError, match="own token_ids, prefix_ids, context and model"):
        store.put(key, kv)
    assert key not in store


def test_kv_that_cannot_be_stored(open_store) -> None:
    """Tensors of a dtype that no model computes in are refused."""
    key, kv = make_chunk(1)
    doubles = ChunkKV([(k_HTD.double(), v_HTD.double()) for k_HTD, v_HTD in kv.layers], kv.token_ids, kv.prefix_ids)
    with pytest.raises(InputError, match="float64"):
        open_store().put(key, doubles)


def test_ls_and_stats(open_store) -> None:
    """The catalog lists tokens, layers and bytes, and the statistics agree with the files."""
    store = open_store()
    pairs = [make_chunk(seed) for seed in range(3)]
    for key, kv in pairs:
        store.put(key, kv)
    rows = store.ls()
    assert [row.key for row in rows] == [key for key, _ in pairs]
    assert {(row.tokens, row.layers, row.bytes) for row in rows} == {(5, 3, FILE_BYTES)}
    assert all(file_of(store, row.key).stat().st_size == row.bytes for row in rows)
    assert all(row.created_ns <= row.used_ns for row in rows)
    stats = json.loads(json.dumps(store.stats().as_dict()))
    assert (stats["nvme"]["entries"], stats["nvme"]["bytes"]) == (3, 3 * FILE_BYTES)
    assert (stats["ram"]["entries"], stats["ram"]["bytes"]) == (3, 3 * RAM_BYTES)


def test_delete_and_clear(open_store) -> None:
    """A deleted entry is gone from RAM, catalog and disk at once; clear does it to all."""
    store = open_store()
    keys = [make_chunk(seed)[0] for seed in range(3)]
    for seed, key in enumerate(keys):
        store.put(key, make_chunk(seed)[1])
    assert store.delete(keys[0])
    assert not store.delete(keys[0])
    assert keys[0] not in store
    assert store.get(keys[0]) is None
    assert files_under(store, "entries") == sorted(str(key) for key in keys[1:])
    store.clear()
    assert files_under(store, "entries") == []
    stats = store.stats()
    assert (stats.ram.entries, stats.ram.bytes, stats.nvme.entries, stats.nvme.bytes) == (0, 0, 0, 0)


def test_closed(open_store) -> None:
    """A closed store refuses to be used, and may be closed again."""
    key, kv = make_chunk(1)
    store = open_store()
    store.close()
    store.close()
    for use in (lambda: store.get(key), lambda: store.put(key, kv), lambda: key in store, store.stats, store.flush):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_unclosed(tmp_path: Path) -> None:
    """A store that nobody closes warns when it is collected, even after it has used its thread, and what was put lasts."""
    key, kv = make_chunk(1)
    store = KVStore(StoreConfig(directory=tmp_path))
    store.put(key, kv, flush=False)
    store.flush()
    alive = weakref.ref(store)
    stores = [store]
    del store

    def let_go() -> None:
        stores.clear()
        until = time.monotonic() + 10
        while alive() is not None and time.monotonic() < until:  # its thread lets go of it a moment after the last write
            time.sleep(0.001)

    with pytest.warns(ResourceWarning, match="not closed"):
        let_go()
    with KVStore(StoreConfig(directory=tmp_path)) as store:
        assert same(store.get(key), kv)


def test_two_stores_share_a_folder(open_store) -> None:
    """What one process puts or deletes, another sees; budgets count both."""
    one, other = open_store(nvme_budget_bytes=2 * FILE_BYTES), open_store(nvme_budget_bytes=2 * FILE_BYTES)
    pairs = [make_chunk(seed) for seed in range(3)]
    one.put(*pairs[0])
    assert same(other.get(pairs[0][0]), pairs[0][1])
    other.put(*pairs[1])
    one.put(*pairs[2])
    assert one.stats().nvme.bytes == other.stats().nvme.bytes == 2 * FILE_BYTES
    assert other.delete(pairs[2][0])
    assert one.stats().nvme.entries == 1
