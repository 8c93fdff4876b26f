"""Namespaces keep to their budgets, and keep what is reserved for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from chunks import FILE_BYTES, MODEL, RAM_BYTES, make_chunk
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.store import ChunkKey, ChunkKV, ConfigError, KVStore, NamespaceShare, StoreConfig, StoreFullError
from cacheblend.store.eviction import Evictable, HeldBytes, TierBudget


def put(store: KVStore, namespace: str, *seeds: int) -> None:
    for seed in seeds:
        store.put(*in_namespace(namespace, seed))


def in_namespace(namespace: str, seed: int) -> tuple[ChunkKey, ChunkKV]:
    _, kv = make_chunk(seed)
    return ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=MODEL, namespace=namespace), kv


def held(store: KVStore) -> list[tuple[str, int]]:
    """Namespace and seed of every entry on NVMe, the least recently used first."""
    seeds = {str(in_namespace(name, seed)[0]): seed for name in ("", "a", "b") for seed in range(9)}
    return [(row.key.namespace, seeds[str(row.key)]) for row in store.ls()]


def test_a_namespace_keeps_to_its_budget(open_store) -> None:
    """A namespace at its budget displaces its own entries, although the tier has room."""
    store = open_store(nvme_shares={"a": NamespaceShare(budget_bytes=2 * FILE_BYTES)})
    put(store, "b", 0)
    put(store, "a", 1, 2, 3)
    assert held(store) == [("b", 0), ("a", 2), ("a", 3)]
    with pytest.raises(StoreFullError, match="namespace 'a' may hold"), store.pin([in_namespace("a", s)[0] for s in (2, 3)]):
        put(store, "a", 4)


def test_a_reserve_is_kept(open_store) -> None:
    """Others' entries displace only what a namespace holds above its reserve, however old."""
    store = open_store(nvme_budget_bytes=3 * FILE_BYTES, nvme_shares={"a": NamespaceShare(reserved_bytes=FILE_BYTES)})
    put(store, "a", 0, 1)
    put(store, "b", 2, 3, 4)
    assert held(store) == [("a", 1), ("b", 3), ("b", 4)]
    put(store, "a", 5)
    assert held(store) == [("b", 3), ("b", 4), ("a", 5)]  # its own was the oldest


def test_a_reserve_that_is_not_used_is_lent(open_store) -> None:
    """What a namespace does not use of its reserve is others', until it wants it."""
    store = open_store(nvme_budget_bytes=3 * FILE_BYTES, nvme_shares={"a": NamespaceShare(reserved_bytes=2 * FILE_BYTES)})
    put(store, "b", 0, 1, 2)
    assert len(held(store)) == 3
    put(store, "a", 3, 4)
    assert held(store) == [("b", 2), ("a", 3), ("a", 4)]
    put(store, "b", 5)
    assert held(store) == [("a", 3), ("a", 4), ("b", 5)]


SALTS = {
    "nvme_budget_bytes": 8 * FILE_BYTES,
    "ram_budget_bytes": 8 * RAM_BYTES,
    "nvme_shares": {"": NamespaceShare(reserved_bytes=4 * FILE_BYTES)},
    "ram_shares": {"": NamespaceShare(reserved_bytes=4 * RAM_BYTES)},
    "recent_share": 0.25,
}  # two entries for each of the two namespaces used last


def tiers(store: KVStore, namespace: str, *seeds: int) -> list[str]:
    """Where entries are; a miss is "none". Looks at them one by one, which makes the last one the youngest."""
    found = []
    for seed in seeds:
        with store.pin([in_namespace(namespace, seed)[0]]) as (placement,):
            found.append("none" if placement is None else placement.tier)
    return found


def test_a_flood_stays_out_of_others_reserves(open_store) -> None:
    """A namespace that nobody named keeps its share against another's flood while it is among those used last."""
    store = open_store(**SALTS)
    put(store, "", *range(5))
    put(store, "a", 0, 1, 2)
    put(store, "b", *range(9))
    assert tiers(store, "", *range(5)) == ["none", *["ram"] * 4]
    assert tiers(store, "a", *range(3)) == ["none", "ram", "ram"]
    assert tiers(store, "b", *range(9)) == [*["none"] * 7, "ram", "ram"]
    assert store.stats().nvme.evictions == 9


def test_a_flood_of_ram(open_store) -> None:
    """RAM keeps the copies of a namespace within its reserve there, although NVMe has room for all."""
    store = open_store(**{**SALTS, "nvme_budget_bytes": 100 * FILE_BYTES})
    put(store, "", *range(5))
    put(store, "a", 0, 1, 2)
    put(store, "b", *range(9))
    with store.pin(
        [in_namespace(*one)[0] for one in [("", 0), ("", 1), ("", 4), ("a", 0), ("a", 1), ("b", 6), ("b", 8)]]
    ) as found:
        assert [placement.tier for placement in found] == ["nvme", "ram", "ram", "nvme", "ram", "nvme", "ram"]
    assert store.stats().ram.evictions == 9
    assert store.stats().nvme.evictions == 0


def test_a_flood_of_namespaces(open_store) -> None:
    """However many namespaces come, the named one's reserve stays, each newcomer finds room, and no more are noted than fit."""
    store = open_store(**SALTS)
    put(store, "", *range(4))
    for number in range(30):
        put(store, f"salt-{number}", 0, 1)
    assert tiers(store, "", *range(4)) == ["ram"] * 4
    for number in (27, 28, 29):
        assert tiers(store, f"salt-{number}", 0, 1) == (["none"] * 2 if number == 27 else ["ram"] * 2)


def test_what_was_used_last_is_known_again(open_store) -> None:
    """A store that is opened knows which namespaces were used last before, so that their reserves hold at once."""
    with open_store(**SALTS) as store:
        put(store, "", *range(4))
        put(store, "old", 0, 1)
        put(store, "a", 0, 1)
        put(store, "b", 0, 1)
    with open_store(**SALTS) as store:
        put(store, "b", *range(2, 9))
        assert tiers(store, "", *range(4)) == ["nvme"] * 4
        assert tiers(store, "a", 0, 1) == ["nvme"] * 2
        assert tiers(store, "old", 0, 1) == ["none"] * 2


def test_namespaces_that_fit_into_both_tiers(open_store) -> None:
    """As many namespaces have a reserve as fit beside the named reserves of each tier; none where nothing is left."""
    for reserved, most in ((4, 2), (7, 0), (0, 4)):
        shares = {"": NamespaceShare(reserved_bytes=reserved * RAM_BYTES)}
        ram, nvme = StoreConfig(**{"directory": "store", **SALTS, "nvme_shares": {}, "ram_shares": shares}).budgets().values()
        assert ram.recent is nvme.recent
        assert ram.recent.limit == most
    with pytest.raises(ConfigError, match=r"recent_share=1\.5"):
        open_store(recent_share=1.5)


def test_everything_is_reserved_for_others(open_store) -> None:
    """An entry that could only displace reserved ones is refused, and nothing goes."""
    store = open_store(nvme_budget_bytes=2 * FILE_BYTES, nvme_shares={"a": NamespaceShare(reserved_bytes=2 * FILE_BYTES)})
    put(store, "a", 0, 1)
    with pytest.raises(StoreFullError, match="reserved for others"):
        put(store, "b", 2)
    assert held(store) == [("a", 0), ("a", 1)]


def test_shares_of_ram(open_store) -> None:
    """RAM has shares of its own; what it drops is still on NVMe."""
    store = open_store(ram_budget_bytes=3 * RAM_BYTES, ram_shares={"a": NamespaceShare(budget_bytes=RAM_BYTES)})
    put(store, "a", 0, 1)
    put(store, "b", 2)
    keys = [in_namespace(name, seed)[0] for name, seed in (("a", 0), ("a", 1), ("b", 2))]
    with store.pin(keys) as placements:
        assert [placement.tier for placement in placements] == ["nvme", "ram", "ram"]
    assert store.stats().ram.bytes == 2 * RAM_BYTES


def test_reopened_with_smaller_shares(open_store) -> None:
    """Opening a store brings each namespace within its budget."""
    with open_store() as store:
        put(store, "a", 0, 1, 2)
        put(store, "b", 3)
    with open_store(nvme_shares={"a": NamespaceShare(budget_bytes=FILE_BYTES)}) as store:
        assert held(store) == [("a", 2), ("b", 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0"),
        ({"budget_bytes": 1.5}, "budget_bytes=1.5"),
        ({"reserved_bytes": -1}, "reserved_bytes=-1"),
        ({"budget_bytes": 1, "reserved_bytes": 2}, "at most budget_bytes=1"),
    ],
)
def test_shares_that_are_none(options: dict[str, object], message: str) -> None:
    """A share that no namespace can have is refused by name and value."""
    with pytest.raises(ConfigError, match=message):
        NamespaceShare(**options)


def test_more_is_reserved_than_there_is() -> None:
    """Reserves that are larger than the tier together are refused."""
    shares = {name: NamespaceShare(reserved_bytes=6) for name in "ab"}
    with pytest.raises(ConfigError, match="reserve at most the tier's 10 bytes; got 12"):
        StoreConfig(directory="store", nvme_budget_bytes=10, nvme_shares=shares)


class EntriesInOrder:
    """Entries that may all be evicted, the oldest first."""

    def __init__(self) -> None:
        self.entries: dict[str, Evictable] = {}
        self.held_bytes = HeldBytes()

    def evictable(self, *, only: str | None = None, spare: Sequence[str] = ()) -> Iterator[Evictable]:
        found = [one for one in self.entries.values() if (only is None or one.namespace == only) and one.namespace not in spare]
        return iter(found)

    def begin_evict(self, name: str) -> bool:
        return True


SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=30)


@given(entries=SIZES, reserves=st.tuples(st.integers(0, 6), st.integers(0, 6)), most=st.integers(1, 12))
def test_choices_hold_every_budget(entries: list[tuple[str, int]], reserves: tuple[int, int], most: int) -> None:
    """Whatever comes, tier and namespace budgets hold, and an entry within its reserve always finds room."""
    shares = {
        "a": NamespaceShare(reserved_bytes=reserves[0]),
        "b": NamespaceShare(reserved_bytes=reserves[1], budget_bytes=max(most, reserves[1], 1)),
    }
    budget = TierBudget(12, shares)
    tier = EntriesInOrder()

    for number, (namespace, size) in enumerate(entries):
        before, victims = {name: tier.held_bytes(name) for name in "abc"}, []
        if not budget.select_victims(tier, victims, namespace, size):
            reserved = shares[namespace].reserved_bytes if namespace in shares else 0
            assert before[namespace] + size > reserved
            continue
        for victim in victims:
            lender = tier.entries.pop(victim)
            tier.held_bytes.add(lender.namespace, -lender.bytes)
            if lender.namespace in shares and lender.namespace != namespace:
                assert tier.held_bytes(lender.namespace) + lender.bytes > shares[lender.namespace].reserved_bytes
        tier.entries[str(number)] = Evictable(str(number), namespace, size)
        tier.held_bytes.add(namespace, size)
        assert tier.held_bytes() <= budget.bytes
        assert all(tier.held_bytes(name) <= budget.limit_bytes(name) for name in "abc")
