"""A tier of copies is one class and one registration: the store, its statistics and the loader take it as it is."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from chunks import RAM_BYTES, make_chunk, put_all, same
from fakes import FakeRemoteTier

from cacheblend.base.errors import ConfigError, DamagedEntryError
from cacheblend.blend import KVGeometry, Prompt, Segment
from cacheblend.loader import LayerLoader, copied_tiers
from cacheblend.store import CACHE_TIERS, ChunkKey, ChunkKV, KVStore, StoreConfig
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.tiers import AdmissionFilter, CacheTier, Pins, read_entry

PAIRS = [make_chunk(seed) for seed in range(4)]


@pytest.mark.parametrize("tier_class", [*CACHE_TIERS.values(), FakeRemoteTier])
def test_every_tier_of_copies(tier_class: type[CacheTier]) -> None:
    """Each registered tier keeps within its budget, spares what is pinned, and returns the bytes that were put."""
    pins, entries = Pins(), [EncodedEntry.from_chunk(*pair) for pair in PAIRS]
    pinned = PAIRS[0][0].digest
    tier = tier_class(3 * RAM_BYTES, pins)
    small = tier_class(1, pins)
    assert not small.put(entries[0])
    assert (small.size(), small.evictions) == ((0, 0), 0)
    with pins.hold([pinned]):
        for entry in entries:
            tier.put(entry)
            assert tier.size()[1] <= 3 * RAM_BYTES
        assert pinned in tier
    held = [(key.digest, kv) for key, kv in PAIRS if key.digest in tier]
    assert tier.size()[0] == len(held)
    for digest, kv in held:
        assert same(read_entry(tier.open(digest), tier).chunk(copy=True), kv)
    tier.discard(pinned)
    assert tier.open(pinned) is None
    tier.close()


@pytest.fixture
def three(open_store, monkeypatch: pytest.MonkeyPatch) -> KVStore:
    """A store with a third tier that holds two entries, and RAM that holds none."""
    monkeypatch.setitem(CACHE_TIERS, FakeRemoteTier.name, FakeRemoteTier)
    return open_store(ram_budget_bytes=1, cache_budgets={"remote": 2 * RAM_BYTES})


def tiers_of(store: KVStore) -> list[str | None]:
    with store.pin([key for key, _ in PAIRS]) as placements:
        return [None if placement is None else placement.tier for placement in placements]


def test_entries_are_found_in_the_fastest_tier_that_has_them(three: KVStore) -> None:
    """Copies come and go by the third tier's own budget; what it has dropped is still on NVMe, and all of it is counted."""
    put_all(three, PAIRS[:3])
    assert tiers_of(three) == ["nvme", "remote", "remote", None]
    three.flush()
    assert all(same(three.get(key), kv) for key, kv in PAIRS[1:3])
    stats = three.stats()
    assert list(stats.tiers) == ["ram", "remote", "nvme"]
    remote = stats.tiers["remote"]
    assert stats.as_dict()["remote"] == asdict(remote)
    assert (remote.entries, remote.bytes, remote.budget_bytes) == (2, 2 * RAM_BYTES, 2 * RAM_BYTES)
    assert remote.hits >= 2
    assert (stats.ram.entries, stats.nvme.entries, stats.misses) == (0, 3, 1)


def test_a_copy_goes_with_its_entry(three: KVStore, open_store) -> None:
    """What is deleted, here or by another process, is found in no tier; closing reaches the third one too."""
    put_all(three, PAIRS[:2])
    assert three.delete(PAIRS[0][0])
    with open_store() as other:
        assert other.delete(PAIRS[1][0])
    assert [three.get(key) for key, _ in PAIRS[:2]] == [None, None]
    assert three.stats().tiers["remote"].entries == 0
    (_, remote, _) = three._tiers
    three.close()
    assert isinstance(remote, FakeRemoteTier)
    assert remote.closed


def test_a_damaged_copy_is_set_aside_by_its_tier(three: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that turns out damaged is dropped, and the entry is read from NVMe from then on."""
    key, kv = PAIRS[0]
    three.put(key, kv)

    def damaged(*_: object) -> None:
        raise DamagedEntryError("not what was written")

    with three.pin([key]) as (placement,), monkeypatch.context() as patch:
        patch.setattr("cacheblend.store.entry.EncodedEntry.read_layer", damaged)
        with pytest.raises(DamagedEntryError):
            placement.read_layer(0)
    with three.pin([key]) as (placement,):
        assert placement.tier == "nvme"
        assert torch.equal(placement.read_layer(0)[0], kv.layers[0][0])


def test_the_loader_reads_from_the_third_tier(three: KVStore) -> None:
    """A loader brings a third tier's layers ahead, as of every tier that is not in memory, and counts its bytes."""
    kv = ChunkKV([(torch.randn(2, 5, 4), torch.randn(2, 5, 4)) for _ in range(3)], range(5))
    key = ChunkKey.of(kv.token_ids, model="model")
    three.put(key, kv)
    geometry = KVGeometry(3, 2, 4, torch.float32, torch.device("cpu"))
    assert FakeRemoteTier.name not in copied_tiers(geometry.device)
    with three.pin([key]) as (placement,), LayerLoader() as loader:
        prompt = Prompt.of([Segment(kv.token_ids, placement), Segment((1,))])
        loader.start(prompt, geometry, reuse_layer_0=True)
        for layer, (k_HTD, v_HTD) in enumerate(kv.layers):
            whole = loader.synchronize(layer)
            assert torch.equal(whole.k_1HND[0, :, :-1], k_HTD)
            assert torch.equal(whole.v_1HND[0, :, :-1], v_HTD)
        assert loader.bytes_by_tier == {"remote": kv.nbytes}


def test_a_tier_that_is_not_registered() -> None:
    """A configuration that names an unknown tier is refused with those there are."""
    with pytest.raises(ConfigError, match="cache_budgets='tape'"):
        StoreConfig(directory="store", cache_budgets={"tape": 1})


def test_the_admission_filter() -> None:
    """A name is new at first and known afterwards; what is remembered weighs no more than the limit, the newest stays."""
    recent = AdmissionFilter(2)
    assert [recent.admits(name) for name in "aabacab"] == [False, True, False, True, False, True, False]
    recent = AdmissionFilter(10)
    asked = (("a", 6), ("b", 4), ("a", 7), ("b", 3), ("a", 7), ("big", 11), ("a", 1))
    assert [name for name, weight in asked if recent.admits(name, weight)] == ["a", "a"]
