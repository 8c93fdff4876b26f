"""Layers read straight to where they are needed."""

import os

import pytest
import torch
from chunks import HEADS, TOKENS, file_of, flip_last_byte, make_chunk, same

from cacheblend.base.errors import DamagedEntryError, InputError
from cacheblend.store.chunk import host_bytes
from cacheblend.store.entry_file import leave_direct

KEY, KV = make_chunk(1)


def room(layer: int, dtype: torch.dtype = torch.float32, stride: int = 3) -> torch.Tensor:
    """Keys and values inside larger memory, as a prompt's layer has them: each head contiguous, heads apart."""
    kv_heads, head_dim = HEADS[layer]
    return torch.full((2, kv_heads, TOKENS + stride, head_dim), torch.nan, dtype=dtype)


@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_layer_comes_to_its_place(open_store, tier: str) -> None:
    """Every layer stands where it was asked for, bit for bit, and nothing beside it is touched."""
    open_store().put(KEY, KV)
    with open_store(ram_budget_bytes=2**20 if tier == "ram" else 1) as store:
        if tier == "ram":
            store.get(KEY)
        with store.pin([KEY]) as (placement,):
            assert placement.tier == tier
            for layer, own in enumerate(KV.layers):
                whole = room(layer)
                placement.read_layer_into(layer, host_bytes(whole)[:, :, 1 : 1 + TOKENS])
                for got, want in zip(whole, own, strict=True):
                    assert torch.equal(got[:, 1 : 1 + TOKENS], want)
                    assert got[:, [0, -2, -1]].isnan().all()


def test_one_read_straight_into_place(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is one read call into the place itself."""
    calls: list[list[int]] = []
    preadv = os.preadv

    def noted(fd: int, to: list[memoryview], at: int) -> int:
        calls.append([len(part) for part in to])
        return preadv(fd, to, at)

    with open_store(ram_budget_bytes=1) as store:
        store.put(KEY, KV)
        with store.pin([KEY]) as (placement,):
            monkeypatch.setattr(os, "preadv", noted)
            for layer, (kv_heads, head_dim) in enumerate(HEADS):
                calls.clear()
                placement.read_layer_into(layer, host_bytes(room(layer))[:, :, :TOKENS])
                assert calls == [[4 * TOKENS * head_dim] * 2 * kv_heads]


def test_damage_is_found_in_place(open_store) -> None:
    """A flipped bit is damage on the straight way too, and the entry is a miss from then on."""
    with open_store(ram_budget_bytes=1) as store:
        store.put(KEY, KV)
        flip_last_byte(file_of(store, KEY))
        with store.pin([KEY]) as (placement,):
            placement.read_layer_into(0, host_bytes(room(0))[:, :, :TOKENS])
            with pytest.raises(DamagedEntryError, match="checksum"):
                placement.read_layer_into(2, host_bytes(room(2))[:, :, :TOKENS])
        assert KEY not in store


@pytest.mark.parametrize(("layer", "dtype"), [(1, torch.float32), (0, torch.bfloat16)])
def test_a_place_that_does_not_fit(open_store, layer: int, dtype: torch.dtype) -> None:
    """Memory of another shape or size is refused before anything is read."""
    with open_store(ram_budget_bytes=1) as store:
        store.put(KEY, KV)
        with store.pin([KEY]) as (placement,), pytest.raises(InputError, match="layer 0"):
            placement.read_layer_into(0, host_bytes(room(layer, dtype))[:, :, :TOKENS])


def test_a_system_without_o_direct(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no O_DIRECT, as on macOS, writes go through the page cache."""
    monkeypatch.delattr(os, "O_DIRECT")
    with open_store(ram_budget_bytes=1) as store:
        store.put(KEY, KV)
        assert same(store.get(KEY), KV)
    assert not leave_direct(0)
