"""Namespaces keep to their budgets, and keep what is reserved for them."""

from __future__ import annotations

import pytest
from chunks import FILE_BYTES, MODEL, RAM_BYTES, make_chunk
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.store import ChunkKey, ChunkKV, ConfigError, KVStore, NamespaceShare, StoreConfig, StoreFullError
from cacheblend.store.eviction import Evictable, TierBudget


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


SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=30)


@given(entries=SIZES, reserves=st.tuples(st.integers(0, 6), st.integers(0, 6)), most=st.integers(1, 12))
def test_choices_hold_every_budget(entries: list[tuple[str, int]], reserves: tuple[int, int], most: int) -> None:
    """Whatever comes, tier and namespace budgets hold, and an entry within its reserve always finds room."""
    shares = {
        "a": NamespaceShare(reserved_bytes=reserves[0]),
        "b": NamespaceShare(reserved_bytes=reserves[1], budget_bytes=max(most, reserves[1], 1)),
    }
    budget = TierBudget(12, shares)
    there: dict[str, Evictable] = {}

    def by_use(*, only: str | None = None, spare: object = ()) -> object:
        return iter([e for e in there.values() if (only is None or e.namespace == only) and e.namespace not in spare])

    def held_by() -> dict[str, int]:
        return {name: sum(e.bytes for e in there.values() if e.namespace == name) for name in "abc"}

    for number, (namespace, size) in enumerate(entries):
        before, victims = held_by(), []
        fits = budget.choose(namespace, size, before, by_use, lambda digest, victims=victims: victims.append(digest) or True)
        if not fits:
            reserved = shares[namespace].reserved_bytes if namespace in shares else 0
            assert before[namespace] + size > reserved
            continue
        for victim in victims:
            giver = there.pop(victim)
            if giver.namespace in shares and giver.namespace != namespace:
                assert held_by()[giver.namespace] + giver.bytes > shares[giver.namespace].reserved_bytes
        there[str(number)] = Evictable(str(number), namespace, size)
        assert sum(held_by().values()) <= budget.bytes
        assert all(held_by()[name] <= budget.most(name) for name in "abc")
