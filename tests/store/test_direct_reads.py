"""Layers read straight to where they are needed, and past the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from chunks import HEADS, TOKENS, file_of, make_chunk, same

from cacheblend.store import ConfigError, DamagedEntryError, InputError, KVStore, StoreConfig
from cacheblend.store.chunk import host_bytes
from cacheblend.store.entry_file import leave_direct

KEY, KV = make_chunk(1)


def room(layer: int, dtype: torch.dtype = torch.float32, stride: int = 3) -> torch.Tensor:
    """Keys and values inside larger memory, as a prompt's layer has them: each head contiguous, heads apart."""
    kv_heads, head_dim = HEADS[layer]
    return torch.full((2, kv_heads, TOKENS + stride, head_dim), torch.nan, dtype=dtype)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_a_layer_comes_to_its_place(tmp_path: Path, tier: str, direct: bool) -> None:
    """Every layer stands where it was asked for, bit for bit, and nothing beside it is touched."""
    with KVStore(StoreConfig(directory=tmp_path / "store")) as store:
        store.put(KEY, KV)
    ram_bytes = 2**20 if tier == "ram" else 1
    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=ram_bytes, direct_reads=direct)) as store:
        if tier == "ram":
            store.get(KEY)
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            assert placement.tier == tier
            for layer, own in enumerate(KV.layers):
                whole = room(layer)
                placement.read_layer_into(layer, host_bytes(whole)[:, :, 1 : 1 + TOKENS])
                for got, want in zip(whole, own, strict=True):
                    assert torch.equal(got[:, 1 : 1 + TOKENS], want)
                    assert got[:, [0, -2, -1]].isnan().all()


def test_direct_reads_keep_no_memory_of_others(tmp_path: Path) -> None:
    """What a direct read has given stays as it is when the thread reads on."""
    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1, direct_reads=True)) as store:
        store.put(KEY, KV)
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            read = [placement.read_layer(layer) for layer in range(len(HEADS))]
        for pair, own in zip(read, KV.layers, strict=True):
            assert all(torch.equal(got, want) for got, want in zip(pair, own, strict=True))


def test_one_read_straight_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is one read call into the place itself; a direct one is one call of whole blocks."""
    calls: list[list[int]] = []
    preadv = os.preadv

    def noted(fd: int, to: list[memoryview], at: int) -> int:
        calls.append([len(part) for part in to])
        return preadv(fd, to, at)

    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1)) as store:
        store.put(KEY, KV)
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            monkeypatch.setattr(os, "preadv", noted)
            for layer, (kv_heads, head_dim) in enumerate(HEADS):
                calls.clear()
                placement.read_layer_into(layer, host_bytes(room(layer))[:, :, :TOKENS])
                assert calls == [[4 * TOKENS * head_dim] * 2 * kv_heads]
    direct = StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1, direct_reads=True)
    with KVStore(direct) as store, store.pin([KEY]) as (placement,):
        assert placement is not None
        calls.clear()
        placement.read_layer_into(2, host_bytes(room(2))[:, :, :TOKENS])
        ((blocks,),) = calls
        assert blocks % 4096 == 0


@pytest.mark.parametrize("direct", [False, True])
def test_damage_is_found_in_place(tmp_path: Path, direct: bool) -> None:
    """A flipped bit is damage on the straight way too, and the entry is a miss from then on."""
    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1, direct_reads=direct)) as store:
        store.put(KEY, KV)
        path = file_of(store, KEY)
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            placement.read_layer_into(0, host_bytes(room(0))[:, :, :TOKENS])
            with pytest.raises(DamagedEntryError, match="checksum"):
                placement.read_layer_into(2, host_bytes(room(2))[:, :, :TOKENS])
        assert KEY not in store


@pytest.mark.parametrize(("layer", "dtype"), [(1, torch.float32), (0, torch.bfloat16)])
def test_a_place_that_does_not_fit(tmp_path: Path, layer: int, dtype: torch.dtype) -> None:
    """Memory of another shape or size is refused before anything is read."""
    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1)) as store:
        store.put(KEY, KV)
        with store.pin([KEY]) as (placement,):
            assert placement is not None
            with pytest.raises(InputError, match="layer 0"):
                placement.read_layer_into(0, host_bytes(room(layer, dtype))[:, :, :TOKENS])


def test_a_file_system_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct reads where the file system has none are refused when the store opens, not at the first request."""

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("cacheblend.store.entry_file.make_direct", refuse)
    with pytest.raises(ConfigError, match="direct_reads"):
        KVStore(StoreConfig(directory=tmp_path / "store", direct_reads=True))


def test_a_system_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no O_DIRECT, as on macOS, writes go through the page cache and direct reads are refused."""
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(ConfigError, match="direct_reads"):
        KVStore(StoreConfig(directory=tmp_path / "direct", direct_reads=True))
    with KVStore(StoreConfig(directory=tmp_path / "store", ram_budget_bytes=1)) as store:
        store.put(KEY, KV)
        assert same(store.get(KEY), KV)
    assert not leave_direct(0)
