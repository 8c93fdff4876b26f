"""The store gives back what was put, or nothing."""

import json
from pathlib import Path

import pytest
import torch
from chunks import FILE_BYTES, MODEL, RAM_BYTES, file_of, files_under, make_chunk, put_all, same
from waiting import wait_until

from cacheblend.base.errors import InputError, StoreError
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig


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
    (one, kv), (other, _) = pairs = [make_chunk(1), make_chunk(2)]
    put_all(store, pairs)
    written = file_of(store, one).stat()
    store.put(one, kv)
    store.put(one, kv, flush=False)
    assert file_of(store, one).stat().st_mtime_ns == written.st_mtime_ns
    assert [row.key for row in store.ls()] == [other, one]
    assert store.stats().pending_writes == 0


@pytest.mark.parametrize("wrong", [{"model": "other"}, {"prefix_ids": (9,)}, {"context": "other"}, {"token_ids": [5]}])
def test_kv_of_another_key(open_store, wrong: dict[str, object]) -> None:
    """KV of another model, prefix, context or text than the key's is refused, and nothing is stored."""
    _, kv = make_chunk(1)
    key = ChunkKey.of(**{"token_ids": kv.token_ids, "prefix_ids": kv.prefix_ids, "model": MODEL, **wrong})
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
    pairs = [make_chunk(seed) for seed in range(3)]
    store = put_all(open_store(), pairs)
    rows = store.ls()
    assert [row.key for row in rows] == [key for key, _ in pairs]
    assert {(row.tokens, row.layers, row.bytes) for row in rows} == {(5, 3, FILE_BYTES)}
    assert all(file_of(store, row.key).stat().st_size == row.bytes for row in rows)
    assert all(row.created_ns <= row.used_ns for row in rows)
    stats = json.loads(json.dumps(store.stats().as_dict()))
    assert (stats["nvme"]["entries"], stats["nvme"]["bytes"]) == (3, 3 * FILE_BYTES)
    assert (stats["ram"]["entries"], stats["ram"]["bytes"]) == (3, 3 * RAM_BYTES)


def test_delete(open_store) -> None:
    """A deleted entry is gone from RAM, catalog and disk at once."""
    pairs = [make_chunk(seed) for seed in range(3)]
    keys = [key for key, _ in pairs]
    store = put_all(open_store(), pairs)
    assert store.delete(keys[0])
    assert not store.delete(keys[0])
    assert keys[0] not in store
    assert store.get(keys[0]) is None
    assert files_under(store, "entries") == sorted(str(key) for key in keys[1:])


def test_closed(open_store) -> None:
    """A closed store refuses to be used, and may be closed again."""
    key, kv = make_chunk(1)
    store = open_store()
    store.close()
    store.close()
    for use in (lambda: store.get(key), lambda: store.put(key, kv), lambda: key in store, store.stats, store.flush):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_unclosed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A store that nobody closes warns when it is collected, even after it has used its thread, and what was put lasts."""
    key, kv = make_chunk(1)
    store = KVStore(StoreConfig(directory=tmp_path))
    store.put(key, kv, flush=False)
    store.flush()
    del store
    wait_until(lambda: len(recwarn) > 0)  # its thread lets go of it a moment after the last write
    assert "not closed" in str(recwarn.pop(ResourceWarning).message)
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
