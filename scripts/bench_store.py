"""The catalog at 100,000 entries: opening, looking up, memory, and what one put costs.

    python scripts/bench_store.py

500 entries are whole; the others are rows of the catalog without a file, which neither opening nor looking up reads. What is
measured runs in a process of its own. Figures:
`open_s`: from `KVStore(...)` to ready, without the import. `lookup_us`: median of `key in store`, half of them misses.
`pin_us`: median of a pin, which opens the file and checks its header. `put_us`: median of a synced put.
`index_bytes_an_entry`: growth of the resident set (VmRSS) from before opening to after the lookups, by entry.
`catalog_bytes_an_entry`: size of the SQLite file, by entry. The last stdout line is one JSON object.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig
from cacheblend.store.catalog import Catalog, CatalogEntry
from cacheblend.store.layout import StoreFolder

MODEL = "0" * 64
FILES = 500
LOOKUPS = 5000


def key_of(number: int) -> ChunkKey:
    """The key of chunk `number`."""
    return ChunkKey.of([number], prefix_ids=(1,), model=MODEL)


def make_chunk(number: int) -> ChunkKV:
    """A chunk of one token and one layer."""
    x_HTD = torch.full((1, 1, 8), float(number))
    return ChunkKV([(x_HTD, x_HTD)], [number], (1,), MODEL)


def fill(directory: Path, entries: int) -> None:
    """Make a store of so many entries, of which the first `FILES` are whole."""
    folder = StoreFolder(directory)
    now_ns = time.time_ns()
    rows = (CatalogEntry(key_of(number), 1, 1, 4160, now_ns, now_ns + number) for number in range(FILES, entries))
    started = time.perf_counter()
    Catalog(folder.catalog, lambda: rows).close()
    print(f"{entries} rows written in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    with KVStore(StoreConfig(directory=directory)) as store:
        for number in range(FILES):
            store.put(key_of(number), make_chunk(number), flush=False)


def resident_bytes() -> int:
    """`VmRSS` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def median_us(seconds: list[float]) -> float:
    """Median in microseconds."""
    return statistics.median(seconds) * 1e6


def measure(directory: Path, entries: int) -> dict[str, float]:
    """Open, look up, pin and put, in this process."""
    choose = random.Random(0)
    keys = [key_of(choose.randrange(2 * entries)) for _ in range(LOOKUPS)]
    whole = [key_of(number) for number in range(FILES)]
    before = resident_bytes()
    started = time.perf_counter()
    with KVStore(StoreConfig(directory=directory, ram_budget_bytes=1)) as store:
        open_s = time.perf_counter() - started
        lookups, pins, puts = [], [], []
        for key in keys:
            started = time.perf_counter()
            _ = key in store
            lookups.append(time.perf_counter() - started)
        grown = resident_bytes() - before
        for key in whole:
            started = time.perf_counter()
            with store.pin([key]) as placements:
                pins.append(time.perf_counter() - started)
                assert placements[0] is not None
        for number in range(2 * entries, 2 * entries + 20):
            started = time.perf_counter()
            store.put(key_of(number), make_chunk(number))
            puts.append(time.perf_counter() - started)
        catalog_bytes = (directory / "catalogue.sqlite").stat().st_size
        return {
            "entries": entries,
            "open_s": round(open_s, 4),
            "lookup_us": round(median_us(lookups), 1),
            "pin_us": round(median_us(pins), 1),
            "put_us": round(median_us(puts), 1),
            "index_bytes_an_entry": round(grown / entries, 1),
            "catalog_bytes_an_entry": round(catalog_bytes / entries, 1),
        }


def main() -> None:
    """Fill a folder and measure in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--measure", type=Path, help="measure this store alone, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.entries)))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "store"
        fill(directory, options.entries)
        command = [sys.executable, __file__, "--entries", str(options.entries), "--measure", str(directory)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    goals = {"open_s": 2.0, "lookup_us": 50.0, "index_bytes_an_entry": 400.0}
    print(json.dumps({**figures, "over_goal": {name: round(figures[name] / goal, 3) for name, goal in goals.items()}}))


if __name__ == "__main__":
    main()
