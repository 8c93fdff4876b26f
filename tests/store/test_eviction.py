"""Eviction: the least recently used entries make room, and one namespace's flood leaves the others half of the budget."""

from __future__ import annotations

from collections.abc import Iterator

from chunks import FILE_BYTES, MODEL, RAM_BYTES, make_chunk
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.store import ChunkKey, ChunkKV, KVStore
from cacheblend.store.eviction import Evictable, HeldBytes, select_victims


def put(store: KVStore, namespace: str, *seeds: int) -> None:
    for seed in seeds:
        store.put(*in_namespace(namespace, seed))


def in_namespace(namespace: str, seed: int) -> tuple[ChunkKey, ChunkKV]:
    _, kv = make_chunk(seed)
    return ChunkKey.of(kv.token_ids, prefix_ids=kv.prefix_ids, model=MODEL, namespace=namespace), kv


def tiers(store: KVStore, namespace: str, *seeds: int) -> list[str]:
    """Tier of each entry; "none" for a miss."""
    with store.pin([in_namespace(namespace, seed)[0] for seed in seeds]) as placements:
        return ["none" if placement is None else placement.tier for placement in placements]


def test_a_flood_leaves_others_half(open_store) -> None:
    """A namespace that holds half of the budget evicts its own entries, in RAM and on NVMe; others' are as they were."""
    store = open_store(nvme_budget_bytes=6 * FILE_BYTES, ram_budget_bytes=6 * RAM_BYTES)
    put(store, "", 0, 1)
    put(store, "a", 0)
    put(store, "flood", *range(9))
    assert tiers(store, "", 0, 1) == ["ram"] * 2
    assert tiers(store, "a", 0) == ["ram"]
    assert tiers(store, "flood", *range(9)) == [*["none"] * 6, *["ram"] * 3]


def test_a_flood_of_namespaces_leaves_documents_half(open_store) -> None:
    """However many salts there are, together they evict their own entries, and documents' stay; the newest finds room."""
    store = open_store(nvme_budget_bytes=6 * FILE_BYTES, ram_budget_bytes=6 * RAM_BYTES)
    put(store, "", 0, 1, 2)
    for number in range(20):
        put(store, f"salt-{number}", 0)
    assert tiers(store, "", 0, 1, 2) == ["ram"] * 3
    assert tiers(store, "salt-19", 0) == ["ram"]


def test_a_namespace_may_hold_everything(open_store) -> None:
    """Room that nobody else uses is a namespace's own, until another one comes."""
    store = open_store(nvme_budget_bytes=4 * FILE_BYTES)
    put(store, "a", 0, 1, 2, 3)
    assert store.stats().nvme.entries == 4
    put(store, "b", 0, 1)
    assert tiers(store, "a", 0, 1, 2, 3) == ["none", "none", "ram", "ram"]
    put(store, "", 5)
    assert tiers(store, "b", 0, 1) == ["none", "ram"]


class EntriesInOrder:
    """Entries that may all be evicted, the oldest first."""

    budget_bytes = 12

    def __init__(self) -> None:
        self.entries: dict[str, tuple[str, int]] = {}
        self.held_bytes = HeldBytes()

    def evictable(self, only: str | None = None, spare: str | None = None) -> Iterator[Evictable[str]]:
        """See `EvictingTier`."""
        entries = self.entries.items()
        return (Evictable(name, size) for name, (own, size) in entries if only in (None, own) and own != spare)

    def begin_evict(self, name: str) -> bool:
        """See `EvictingTier`."""
        return True


@given(entries=st.lists(st.tuples(st.sampled_from(["", "b", "c"]), st.integers(1, 13)), max_size=30))
def test_choices_hold_the_budget(entries: list[tuple[str, int]]) -> None:
    """The budget holds, only an entry beyond it finds no room, and nobody loses an entry to one with more than half before."""
    tier = EntriesInOrder()
    for number, (namespace, size) in enumerate(entries):
        victims: list[str] = []
        assert select_victims(tier, victims, namespace, size) == (size <= tier.budget_bytes)
        if size > tier.budget_bytes:
            assert not victims
            continue
        own = [name for name, (other, _) in tier.entries.items() if other == namespace]
        is_large = 2 * (tier.held_bytes(namespace) + size) > tier.budget_bytes
        if is_large and not set(victims) <= set(own):
            assert set(own) <= set(victims)
        for victim in victims:
            other, other_size = tier.entries.pop(victim)
            tier.held_bytes.add(other, -other_size)
        tier.entries[str(number)] = namespace, size
        tier.held_bytes.add(namespace, size)
        assert tier.held_bytes() <= tier.budget_bytes
