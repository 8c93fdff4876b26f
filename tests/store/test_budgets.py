"""Budgets hold in both tiers, and what was used least recently goes first."""

import pytest
from chunks import FILE_BYTES, RAM_BYTES, file_of, files_under, make_chunk, put_all, same
from waiting import wait_until

from cacheblend.base.errors import StoreFullError
from cacheblend.store import PASSAGES, ChunkKey, KVStore

PAIRS = [make_chunk(seed) for seed in range(6)]
KEYS = [key for key, _ in PAIRS]


def held(store: KVStore) -> list[int]:
    """Which of the chunks are on NVMe, the least recently used first."""
    return [KEYS.index(row.key) for row in store.ls()]


def tier_of(store: KVStore, seed: int) -> str:
    with store.pin([KEYS[seed]]) as (placement,):
        return placement.tier


def test_ram_drops_the_least_recently_used_copy(open_store) -> None:
    """RAM keeps what was used last; what it drops is still on NVMe, and comes back when it is got."""
    store = put_all(open_store(ram_budget_bytes=2 * RAM_BYTES), PAIRS[:2])
    store.get(KEYS[0])
    store.put(*PAIRS[2])
    assert store.stats().ram.entries == 2
    assert store.stats().ram.evictions == 1
    assert [tier_of(store, seed) for seed in (0, 2)] == ["ram", "ram"]
    assert same(store.get(KEYS[1]), PAIRS[1][1])
    assert store.stats().nvme.hits == 1
    assert tier_of(store, 1) == "ram"
    assert store.stats().ram.bytes == 2 * RAM_BYTES


def test_pinned_on_nvme_is_copied_to_ram_afterwards(open_store) -> None:
    """An entry that a pin found on NVMe is in RAM soon after the pin, where that has room."""
    open_store(ram_budget_bytes=1).put(*PAIRS[0])
    store = open_store(ram_budget_bytes=RAM_BYTES)
    with store.pin([KEYS[0]]) as (placement,):
        assert placement.tier == "nvme"
    wait_until(lambda: store.stats().ram.entries == 1)
    assert tier_of(store, 0) == "ram"


def test_a_full_ram_takes_what_is_read_again(open_store) -> None:
    """A full RAM keeps what it has when others are read once, and takes one that is read again before as much else was."""
    store = put_all(open_store(ram_budget_bytes=RAM_BYTES), PAIRS[:3])
    for place in (0, 1, 0, 1):  # each time the other was read since
        assert tier_of(store, place) == "nvme"
    assert tier_of(store, 2) == "ram"
    assert tier_of(store, 1) == "nvme"
    wait_until(lambda: store.stats().ram.evictions == 3)
    assert tier_of(store, 1) == "ram"


@pytest.mark.parametrize("flush", [True, False])
def test_entry_above_the_nvme_budget(open_store, flush: bool) -> None:
    """An entry that could never fit is refused, and what is there stays."""
    store = open_store(nvme_budget_bytes=FILE_BYTES)
    store.put(*PAIRS[0])
    key, kv = make_chunk(9, heads=((8, 64),) * 4)
    with pytest.raises(StoreFullError, match="nvme_budget_bytes"):
        store.put(key, kv, flush=flush)
    assert held(store) == [0]
    assert key not in store


def test_everything_is_pinned(open_store) -> None:
    """A put that could only displace pinned entries is refused, and works after the pins are gone."""
    store = put_all(open_store(nvme_budget_bytes=2 * FILE_BYTES, ram_budget_bytes=2 * RAM_BYTES), PAIRS[:2])
    with store.pin(KEYS[:2]):
        with pytest.raises(StoreFullError, match="pinned"):
            store.put(*PAIRS[2])
        assert held(store) == [0, 1]
    assert files_under(store, "writing") == []
    store.put(*PAIRS[2])
    assert held(store) == [1, 2]


def test_reopened_with_a_smaller_budget(open_store, caplog: pytest.LogCaptureFixture) -> None:
    """Opening a store brings it within its budget, oldest use first, and says so; order of use outlives closing."""
    with put_all(open_store(), PAIRS[:4]) as store:
        store.get(KEYS[0])
    with open_store(nvme_budget_bytes=2 * FILE_BYTES) as store:
        assert held(store) == [3, 0]
        assert file_of(store, KEYS[0]).exists()
        assert not file_of(store, KEYS[1]).exists()
        assert store.stats().nvme.evictions == 2
    assert f"the KV of 2 chunks exceeded nvme_budget_bytes={2 * FILE_BYTES}" in caplog.text


def test_passages_go_first(open_store) -> None:
    """Passages are evicted before what is older; those of each namespace have an eighth of the budget, the older ones go."""

    def passage(seed: int, namespace: str) -> ChunkKey:
        return ChunkKey.of(PAIRS[seed][1].token_ids, prefix_ids=(1,), model=KEYS[seed].model, namespace=PASSAGES + namespace)

    store = put_all(open_store(nvme_budget_bytes=16 * FILE_BYTES), PAIRS[:1])
    for seed, namespace in ((1, "a"), (2, "a"), (1, "b"), (3, "a"), (4, "a")):
        store.put(passage(seed, namespace), PAIRS[seed][1])
    assert {row.key for row in store.ls()} == {KEYS[0], passage(1, "b"), passage(3, "a"), passage(4, "a")}
    store.close()
    with open_store(nvme_budget_bytes=4 * FILE_BYTES) as store:
        put_all(store, PAIRS[1:3])
        assert {row.key for row in store.ls()} == {*KEYS[:3], passage(4, "a")}


def test_clock_that_goes_back(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of use follows the uses, not a clock that was set back."""
    put_all(open_store(), PAIRS[:2]).close()
    monkeypatch.setattr("time.time_ns", lambda: 1)
    with open_store() as store:
        store.get(KEYS[0])
        store.put(*PAIRS[2])
        assert held(store) == [1, 0, 2]
