"""A placement reads one layer at a time for as long as its pin lasts."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from chunks import FILE_BYTES, HEADS, RAM_BYTES, make_chunk, put_all, same
from waiting import wait_until

from cacheblend.base.errors import StoreError
from cacheblend.store.entry_file import EntryFile

KEY, KV = make_chunk(1)


def test_what_a_placement_tells(open_store) -> None:
    """A placement knows tier, shape, bytes, ids and model before anything is read, in the order of the keys."""
    open_store().put(KEY, KV)
    store = open_store()
    store.put(*make_chunk(2))
    with store.pin([make_chunk(2)[0], make_chunk(3)[0], KEY]) as (ram, missing, nvme):
        assert missing is None
        assert (ram.tier, nvme.tier) == ("ram", "nvme")
        assert nvme.key == KEY
        assert (len(nvme.token_ids), nvme.num_layers, nvme.dtype) == (5, 3, torch.float32)
        assert (nvme.token_ids, nvme.prefix_ids, nvme.model) == (KV.token_ids, KV.prefix_ids, KV.model)
        assert [nvme.layer_bytes(i) for i in range(3)] == [2 * 4 * 5 * h * d for h, d in HEADS]
        assert sum(ram.layer_bytes(i) for i in range(3)) == RAM_BYTES


def test_a_look_up_that_raises_leaves_no_file_open(open_store, monkeypatch) -> None:
    """Where the third of three look-ups raises, the files of the first two are closed, and the entries are read later."""
    pairs = [make_chunk(seed) for seed in (1, 2, 3)]
    put_all(open_store(), pairs).close()
    store = open_store()
    opened = []

    def failing(digest: str) -> EntryFile | None:
        if len(opened) == 2:
            raise MemoryError
        opened.append(open_file(digest))
        return opened[-1]

    open_file = store._nvme.open
    with monkeypatch.context() as patch:
        patch.setattr(store._nvme, "open", failing)
        with pytest.raises(MemoryError), store.pin([key for key, _ in pairs]):
            pass
    for file in opened:
        with pytest.raises(StoreError, match="closed"):
            file.read_layer(0)
    assert all(same(store.get(key), kv) for key, kv in pairs)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_layers_read_by_another_thread(open_store, tier: str) -> None:
    """A loader's thread reads every layer bit for bit from both tiers, deleted meanwhile or not, until its pin is released."""
    open_store().put(KEY, KV)
    store = open_store()
    if tier == "ram":
        store.get(KEY)
    with store.pin([KEY]) as (placement,):
        assert placement.tier == tier
        assert (store if tier == "ram" else open_store()).delete(KEY)
        with ThreadPoolExecutor(1) as thread:
            read = dict(zip((2, 0, 1), thread.map(placement.read_layer, (2, 0, 1)), strict=True))
        assert same(replace(KV, layers=[read[layer] for layer in range(3)]), KV)
    assert KEY not in store
    with pytest.raises(StoreError, match="released"):
        placement.read_layer(0)


def test_ram_gives_views(open_store) -> None:
    """Reading a layer from RAM copies nothing."""
    store = open_store()
    store.put(KEY, KV)
    with store.pin([KEY]) as (placement,):
        assert placement.read_layer(0)[0].data_ptr() == placement.read_layer(0)[0].data_ptr()


def test_everything_is_released_when_the_block_fails(open_store) -> None:
    """An exception in the block closes the files and ends the pins."""
    open_store().put(KEY, KV)
    store = open_store(nvme_budget_bytes=FILE_BYTES)
    before = len(os.listdir("/proc/self/fd"))

    def fail() -> None:
        with store.pin([KEY, KEY]) as placements:
            assert {placement.tier for placement in placements} == {"nvme"}
            raise RuntimeError("fusing failed")

    with pytest.raises(RuntimeError, match="fusing"):
        fail()
    assert len(os.listdir("/proc/self/fd")) == before
    store.put(*make_chunk(2))
    assert KEY not in store


def test_pin_during_a_background_write(open_store) -> None:
    """An entry that waits to be written is placed in RAM even where the RAM tier has no room for it."""
    store = open_store(ram_budget_bytes=1)
    with store.exclusive():
        store.put(KEY, KV, flush=False)
        with store.pin([KEY]) as (placement,):
            assert placement.tier == "ram"
            assert torch.equal(placement.read_layer(0)[0], KV.layers[0][0])
    wait_until(lambda: store.stats().pending_writes == 0)
    with store.pin([KEY]) as (placement,):
        assert placement.tier == "nvme"
