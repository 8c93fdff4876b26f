"""Hit rate against cache size on a Zipf corpus, simulated with the store's own eviction and admission code.

    python scripts/simulate_cache.py                    # the table of docs/scaling.md, some minutes of one core
    python scripts/simulate_cache.py --chunks 2000 --lookups 20000
    python scripts/simulate_cache.py --check            # a small run, and the same requests to a real store on disk

Chunks are asked for independently of each other, the chunk of rank i with a weight of i^-s, `--chunks-per-request` of them at a
time. The simulation runs the store's RAM tier itself (`RamTier`, with `TierBudget.select_victims` and the second-hit
`AdmissionFilter`) over entries that have a size and no bytes. The disk is the same class without admission: it takes every
chunk that was missed, as the store does, and evicts what was used least recently.

Columns: `disk` is the disk's size, as a share of the bytes of the whole corpus, `RAM` a tenth of that. `hits` is the share of
lookups that either of them has, `of RAM` the share that RAM has, `best` what a cache of the disk's size would have that holds
the most popular chunks from the start. `plain RAM` is `of RAM` where every chunk read from the disk is copied to RAM, without
the second-hit filter. `evictions` are those of the disk, for a thousand lookups. The first fifth of the lookups warms up and is
not counted.

With `--check` both tiers must have exactly the hits of the real store. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.eviction import Pins, TierBudget
from cacheblend.store.ram_tier import RamTier

EXPONENTS = (0.7, 0.9, 1.1)
DISK_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
RAM_SHARE = 0.1  # of the disk's bytes
WARM_SHARE = 0.2  # of the lookups
DRAWN = 2**16  # chunks at once
UNIT = 1000  # bytes of a simulated entry


def zipf_requests(chunks: int, exponent: float, lookups: int, per_request: int, seed: int) -> Iterator[list[int]]:
    """Requests for chunks 0, 1, ... by falling popularity, each chunk once a request."""
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -exponent
    borders = np.cumsum(weights / weights.sum())
    choose, left = np.random.default_rng(seed), lookups
    while left > 0:
        drawn = np.searchsorted(borders, choose.random(DRAWN)).clip(max=chunks - 1).tolist()
        for first in range(0, DRAWN - per_request + 1, per_request):
            if left <= 0:
                return
            left -= per_request
            yield list(dict.fromkeys(drawn[first : first + per_request]))


def best_hits(chunks: int, exponent: float, held: int) -> float:
    """The share of lookups that a cache of the most popular chunks has."""
    weights = np.arange(1, chunks + 1, dtype=np.float64) ** -exponent
    return float(weights[:held].sum() / weights.sum())


@dataclass
class Hits:
    """Lookups, and which tier had them."""

    lookups: int = 0
    ram: int = 0
    disk: int = 0
    evictions: int = 0

    @property
    def share(self) -> float:
        """Hits of both tiers."""
        return (self.ram + self.disk) / self.lookups

    @property
    def ram_share(self) -> float:
        """Hits of RAM."""
        return self.ram / self.lookups


class DiskTier(RamTier):
    """The disk: takes every chunk, and tells what it evicted."""

    def __init__(self, budget: TierBudget, pins: Pins) -> None:
        super().__init__(budget, pins)
        self.evicted: list[str] = []

    def _drop(self, digest: str) -> None:
        super()._drop(digest)
        self.evicted.append(digest)


@dataclass
class SimulatedStore:
    """The store's two tiers over entries that have a size and no bytes; see `KVStore.pin` and `KVStore.put`.

    Args:
        ram_bytes: budget of RAM.
        disk_bytes: budget of the disk.
        ram_entry_bytes: of an entry in RAM.
        disk_entry_bytes: of an entry's file.
        admits_all: copy whatever is read from the disk to RAM.
    """

    ram_bytes: int
    disk_bytes: int
    ram_entry_bytes: int = UNIT
    disk_entry_bytes: int = UNIT
    admits_all: bool = False
    hits: Hits = field(default_factory=Hits)

    def __post_init__(self) -> None:
        pins = Pins()
        self._ram, self._disk = RamTier(TierBudget(self.ram_bytes), pins), DiskTier(TierBudget(self.disk_bytes), pins)

    def ask(self, chunks: Sequence[int]) -> None:
        """Look a request's chunks up, copy what is worth it to RAM, and store those that were missed."""
        digests = [str(chunk) for chunk in chunks]
        read = [digest for digest in digests if self._look_up(digest)]
        for digest in [digest for digest in read if self._ram.admits(digest, self.ram_entry_bytes) or self.admits_all]:
            self._copy(digest)
        for digest in digests:
            if digest not in self._disk:
                self._store(digest)

    def _look_up(self, digest: str) -> bool:
        """Whether the entry is on the disk alone; a hit in RAM is a use of both."""
        in_ram, on_disk = self._ram.open(digest) is not None, self._disk.open(digest) is not None
        self.hits.lookups += 1
        self.hits.ram += in_ram
        self.hits.disk += on_disk and not in_ram
        return on_disk and not in_ram

    def _store(self, digest: str) -> None:
        self._disk.put(_entry(digest, self.disk_entry_bytes))
        self.hits.evictions += len(self._disk.evicted)
        while self._disk.evicted:
            self._ram.discard(self._disk.evicted.pop())
        self._copy(digest)

    def _copy(self, digest: str) -> None:
        self._ram.put(_entry(digest, self.ram_entry_bytes))


def _entry(digest: str, nbytes: int) -> EncodedEntry:
    """All of an entry that a tier in memory looks at."""
    return cast(
        EncodedEntry, SimpleNamespace(info=SimpleNamespace(key=SimpleNamespace(digest=digest, namespace="")), nbytes=nbytes)
    )


@dataclass(frozen=True)
class Corpus:
    """Chunks, and how they are asked for."""

    chunks: int
    lookups: int
    per_request: int
    seed: int

    def requests(self, exponent: float) -> Iterator[list[int]]:
        """See `zipf_requests`."""
        return zipf_requests(self.chunks, exponent, self.lookups, self.per_request, self.seed)

    def run(self, store: SimulatedStore, exponent: float) -> Hits:
        """The hits of all requests after the warm-up."""
        requests = self.requests(exponent)
        while store.hits.lookups < WARM_SHARE * self.lookups:
            store.ask(next(requests))
        store.hits = Hits()
        for request in requests:
            store.ask(request)
        return store.hits


def table(corpus: Corpus) -> list[dict[str, float]]:
    """A row for each exponent and size."""
    rows = []
    for exponent, share in itertools.product(EXPONENTS, DISK_SHARES):
        disk = int(share * corpus.chunks) * UNIT
        found = corpus.run(SimulatedStore(int(RAM_SHARE * disk), disk), exponent)
        plain = corpus.run(SimulatedStore(int(RAM_SHARE * disk), disk, admits_all=True), exponent)
        rows.append(
            {
                "exponent": exponent,
                "disk": share,
                "hits": round(found.share, 3),
                "ram_hits": round(found.ram_share, 3),
                "plain_ram_hits": round(plain.ram_share, 3),
                "best": round(best_hits(corpus.chunks, exponent, disk // UNIT), 3),
                "evictions": round(1000 * found.evictions / found.lookups, 1),
            }
        )
        print(f"s = {exponent}, disk {share:.0%} done", file=sys.stderr)
    return rows


def print_table(rows: Sequence[dict[str, float]]) -> None:
    """The rows as Markdown."""
    print("| s | disk | hits | of RAM | plain RAM | best | evictions |\n|---|---|---|---|---|---|---|")
    for row in rows:
        shares = " | ".join(f"{row[name]:.1%}" for name in ("hits", "ram_hits", "plain_ram_hits", "best"))
        print(f"| {row['exponent']} | {row['disk']:.0%} | {shares} | {row['evictions']:.0f} |")


def real_chunk(number: int) -> tuple[ChunkKey, ChunkKV]:
    """A chunk of the real store, all of one size."""
    ids = [number, 1]
    layers = [(torch.full((1, 2, 4), float(number)), torch.zeros(1, 2, 4)) for _ in range(2)]
    return ChunkKey.of(ids, model="simulated"), ChunkKV(layers=layers, token_ids=ids)


def compare(corpus: Corpus, exponent: float, directory: Path, ram_entries: int, disk_entries: int) -> dict[str, Any]:
    """Hits of the simulation, and of a real store that is asked for the same chunks."""
    key, kv = real_chunk(0)
    with KVStore(StoreConfig(directory=directory / "measured")) as store:
        store.put(key, kv)
        ram_bytes, disk_bytes = store.stats().ram.bytes, store.stats().nvme.bytes
    simulated = SimulatedStore(ram_entries * ram_bytes, disk_entries * disk_bytes, ram_bytes, disk_bytes)
    config = StoreConfig(
        directory=directory / "store", ram_budget_bytes=ram_entries * ram_bytes, nvme_budget_bytes=disk_entries * disk_bytes
    )
    with KVStore(config) as store:
        for request in corpus.requests(exponent):
            simulated.ask(request)
            chunks = [real_chunk(number) for number in request]
            with store.pin([key for key, _ in chunks]) as placements:
                missed = [chunk for chunk, placement in zip(chunks, placements, strict=True) if placement is None]
            store.flush()
            for key, kv in missed:
                store.put(key, kv)
        stats = store.stats()
    found = simulated.hits
    return {
        "exponent": exponent,
        "lookups": found.lookups,
        "simulated": {"ram": found.ram, "disk": found.disk, "evictions": found.evictions},
        "real": {"ram": stats.ram.hits, "disk": stats.nvme.hits, "evictions": stats.nvme.evictions},
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate and print; gives the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, help="of the corpus; left out, 20,000, or 200 with --check")
    parser.add_argument("--lookups", type=int, help="left out, ten for each chunk, or 3,000 with --check")
    parser.add_argument("--chunks-per-request", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with a real store, whose disk holds a quarter")
    options = parser.parse_args(arguments)
    figures: dict[str, Any]
    chunks = options.chunks or (200 if options.check else 20_000)
    lookups = options.lookups or (3000 if options.check else 10 * chunks)
    corpus = Corpus(chunks, lookups, options.chunks_per_request, options.seed)
    if options.check:
        ram, disk = chunks // 20, chunks // 4
        with tempfile.TemporaryDirectory() as folder:
            runs = [compare(corpus, exponent, Path(folder) / str(exponent), ram, disk) for exponent in EXPONENTS]
        for run in runs:
            print(run)
            assert run["simulated"] == run["real"], run
        figures = {"agree": True, "runs": runs}
    else:
        rows = table(corpus)
        print_table(rows)
        figures = {"chunks": corpus.chunks, "lookups": corpus.lookups, "per_request": corpus.per_request, "rows": rows}
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
