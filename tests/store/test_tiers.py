"""Copies in RAM: what is held, what is dropped, and what of many entries read once is worth a copy."""

import pytest
import torch
from chunks import RAM_BYTES, make_chunk, same

from cacheblend.base.errors import DamagedEntryError
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.tiers import AdmissionFilter, Pins, RamTier, read_entry

PAIRS = [make_chunk(seed) for seed in range(4)]


def test_the_tier_in_ram() -> None:
    """It keeps within its budget, spares what is pinned, and returns the bytes that were put."""
    pins, entries = Pins(), [EncodedEntry.from_chunk(*pair) for pair in PAIRS]
    pinned = PAIRS[0][0].digest
    tier = RamTier(3 * RAM_BYTES, pins)
    small = RamTier(1, pins)
    assert not small.put(entries[0])
    assert (small.size(), small.evictions) == ((0, 0), 0)
    with pins.hold([pinned]):
        for entry in entries:
            tier.put(entry)
            assert tier.size()[1] <= 3 * RAM_BYTES
        assert pinned in tier
    held = [(key.digest, kv) for key, kv in PAIRS if key.digest in tier]
    assert tier.size()[0] == len(held) == 3
    for digest, kv in held:
        found = tier.open(digest)
        assert found is not None
        assert same(read_entry(found, tier).chunk(copy=True), kv)
    tier.discard(pinned)
    assert tier.open(pinned) is None


def test_a_damaged_copy_is_dropped(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that turns out damaged is dropped, and the entry is read from NVMe from then on."""
    store = open_store()
    key, kv = PAIRS[0]
    store.put(key, kv)

    def damaged(*_: object) -> None:
        raise DamagedEntryError("not what was written")

    with store.pin([key]) as (placement,), monkeypatch.context() as patch:
        patch.setattr("cacheblend.store.entry.EncodedEntry.read_layer", damaged)
        with pytest.raises(DamagedEntryError):
            placement.read_layer(0)
    with store.pin([key]) as (placement,):
        assert placement.tier == "nvme"
        assert torch.equal(placement.read_layer(0)[0], kv.layers[0][0])


def test_the_admission_filter() -> None:
    """A name is new at first and known afterwards; what is remembered weighs no more than the limit, the newest stays."""
    recent = AdmissionFilter(2)
    assert [recent.admits(name) for name in "aabacab"] == [False, True, False, True, False, True, False]
    recent = AdmissionFilter(10)
    asked = (("a", 6), ("b", 4), ("a", 7), ("b", 3), ("a", 7), ("big", 11), ("a", 1))
    assert [name for name, weight in asked if recent.admits(name, weight)] == ["a", "a"]
