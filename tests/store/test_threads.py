"""Threads that share a store."""

import random
from concurrent.futures import ThreadPoolExecutor

import torch
from chunks import FILE_BYTES, RAM_BYTES, make_chunk, same

from cacheblend.base.errors import StoreFullError

PAIRS = [make_chunk(seed) for seed in range(8)]


def test_threads_hammering(open_store) -> None:
    """Puts, gets, pins and deletes from three threads under small budgets never give wrong bytes or break a budget."""
    budgets = {"ram_budget_bytes": 2 * RAM_BYTES, "write_queue_bytes": 2 * RAM_BYTES}
    store = open_store(nvme_budget_bytes=5 * FILE_BYTES, **budgets)

    def hammer(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(120):
            pairs = choose.sample(PAIRS, 2)
            key, kv = pairs[0]
            match choose.randrange(5):
                case 0 | 1:
                    store.put(key, kv, flush=choose.random() < 0.5)
                case 2:
                    got = store.get(key)
                    assert got is None or same(got, kv)
                case 3:
                    with store.pin([key for key, _ in pairs]) as placements:
                        for (_, kv), placement in zip(pairs, placements, strict=True):
                            for layer in range(3 if placement else 0):
                                assert torch.equal(placement.read_layer(layer)[1], kv.layers[layer][1])
                case 4:
                    store.delete(key)
            stats = store.stats()
            assert stats.nvme.bytes <= 5 * FILE_BYTES
            assert stats.ram.bytes <= 2 * RAM_BYTES

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(hammer, range(3)))
    store.flush()
    assert store.verify().ok
    assert store.stats().damaged == 0


def test_pinned_entries_survive_a_storm(open_store) -> None:
    """Entries pinned by one thread stay in the store while others fill it."""
    store = open_store(nvme_budget_bytes=4 * FILE_BYTES, ram_budget_bytes=2 * RAM_BYTES)

    def fill(seed: int) -> None:
        for key, kv in random.Random(seed).choices(PAIRS[2:], k=40):
            store.put(key, kv)

    def hold(seed: int) -> None:
        key, kv = PAIRS[seed]
        for _ in range(40):
            try:
                store.put(key, kv)
            except StoreFullError:  # the others' pins
                continue
            with store.pin([key]) as (placement,):
                if placement is not None:
                    assert torch.equal(placement.read_layer(2)[0], kv.layers[2][0])
                    assert key in store
                    assert key in {row.key for row in store.ls()}

    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(task, seed) for task in (fill, hold) for seed in range(2)]
        for job in jobs:
            job.result()
    assert store.stats().damaged == 0
