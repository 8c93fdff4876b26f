"""The loader against what the disk, the memory and the arithmetic allow, and the controller against a search.

    python scripts/bench_loader.py                                   # on a quiet machine, half an hour or so
    python scripts/bench_loader.py --threads 1 --lengths 1024 --rates 20e6 200e6 2e9 --repeats 1

Everything is a ratio inside one run; medians over repeats, interleaved where two things are compared.

- `nvme_over_fio`: bytes per second of the loader alone, files read layer by layer with direct reads and checksums on, over what
  fio reads from the same files with the same read size (psync, direct, one job for each read in flight).
  `cached_over_fio`: the same through the page cache, dropped before each run, against fio through the page cache, dropped too.
  Without fio on this machine the peer is a plain O_DIRECT reader in this script, and `nvme_peer` says so.
- `ram_over_copy`: bytes per second of the loader alone from the RAM tier over a plain torch copy, by all of its threads, of as
  many bytes from other memory into the same new memory. Neither rotates. Each side runs several times in a row, in turns: right
  after the other's, threads of the one still spin on the cores that the other needs.
- `ttft_over_bound`: TTFT with a throttled tier over max(T_load, T_recompute) + the first layer's load: T_load is the loader
  alone at that rate, T_recompute the fuse with all KV in memory. The worst and the median of the grid.
- `ttft_prediction_error`: |predicted - measured| / measured of the controller's plan, over the grid. Worst and median. Before
  each length and rate the controller plans and sees a window of requests, as it does in a service: so it corrects its profile
  where the machine is not as it was when that was measured.
- `ratio_over_search`: where loading is the longer side (the search runs there alone), the controller's ratio over the largest
  of a list of ratios whose measured TTFT is within 5 % of that at r*. `ttft_over_quality`: TTFT at the controller's ratio over
  TTFT at r*.
- `reuse_over_full`: TTFT of the blend over full prefill where the controller said that blending is faster; the worst.
  `full_over_reuse`: TTFT of full prefill over the blend at r* where it chose full prefill; the worst.

The throttle is a rate limit around the loader's reads in this script; the store knows nothing of it. TTFT is from the plan to
the first logits. The last stdout line is one JSON object; Ctrl-C ends the grid early, and the object is of what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_fusor import make_fusor
from disk_peer import fio_rate, reader_rate
from loader_calls import CHUNK_TOKENS, Bench, medians
from throttled_loader import Throttle, ThrottledLoader

from cacheblend.blend import FusionConfig, LayerKV
from cacheblend.loader import LayerLoader, LoaderConfig, LoadingController, Profile, TierSpeed, measure_profile
from cacheblend.loader.controller import WINDOW
from cacheblend.loader.profiler import drop_page_cache
from cacheblend.store import KVStore, StoreConfig

SEARCHED = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def disk(bench: Bench, folder: Path, repeats: int, *, direct: bool) -> dict[str, Any]:
    """The NVMe tier against fio, or against a plain reader, on the same files; page cache dropped before each."""
    files = sorted(path for path in (folder / "kv" / "entries").rglob("*") if path.is_file())
    geometry, jobs = bench.fusor.decoder.geometry, bench.config.reads_in_flight
    block = geometry.layer_bytes(CHUNK_TOKENS)
    total = block * geometry.layers * len(files)

    def loader_rate() -> float:
        drop_page_cache(files)
        with KVStore(StoreConfig(directory=folder / "kv", ram_budget_bytes=1, direct_reads=direct)) as store:
            bench.store = store
            with bench.placed(len(bench.keys)) as segments:
                return total / bench.load_alone_s(segments, LayerLoader(bench.config), layer_0=True)

    fio = shutil.which("fio")
    peer = (lambda: fio_rate(fio, files, block, jobs, direct)) if fio else (lambda: reader_rate(files, block, jobs))
    rates = medians({"loader": loader_rate, "peer": peer}, repeats)
    name = "nvme" if direct else "cached"
    return {
        f"{name}_over_fio": rates["loader"] / rates["peer"],
        f"{name}_bytes_per_s": rates["loader"],
        f"{name}_peer_bytes_per_s": rates["peer"],
        "nvme_peer": "fio" if fio else "plain O_DIRECT reader",
    }


def memory(bench: Bench, repeats: int) -> dict[str, Any]:
    """The RAM tier against a plain torch copy of the same bytes."""
    geometry = bench.fusor.decoder.geometry
    for key in bench.keys:
        bench.store.get(key)
    chunks = len(bench.keys)
    total = geometry.layer_bytes(CHUNK_TOKENS) * geometry.layers * chunks
    tokens = CHUNK_TOKENS * chunks
    sources = [torch.randn(2, 1, geometry.kv_heads, tokens, geometry.head_dim) for _ in range(geometry.layers)]

    def loaded() -> float:
        with bench.placed(chunks) as segments:
            return total / bench.load_alone_s(segments, LayerLoader(bench.config), layer_0=True)

    def copied() -> float:
        started = time.perf_counter()
        cache = [LayerKV.empty(geometry, tokens) for _ in range(geometry.layers)]
        for whole, source in zip(cache, sources, strict=True):
            whole.kv_21HND.copy_(source)
        return total / (time.perf_counter() - started)

    rates = medians({"loader": loaded, "copy": copied}, repeats, in_a_row=8)
    return {
        "ram_over_copy": rates["loader"] / rates["copy"],
        "ram_bytes_per_s": rates["loader"],
        "copy_bytes_per_s": rates["copy"],
    }


def throttled(profile: Profile, rate: float) -> Profile:
    """The profile of the same machine with a tier of this rate."""
    return dataclasses.replace(profile, tiers={tier: TierSpeed(read_s=0.0, bytes_per_s=rate) for tier in profile.tiers})


def overlap(bench: Bench, profile: Profile, chunks: int, rate: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One length and rate: TTFT at each ratio, at the controller's own, and at those that are searched."""
    geometry = bench.fusor.decoder.geometry
    controller = LoadingController(bench.config, throttled(profile, rate), FusionConfig().schedule, ())
    fresh = len(bench.head.token_ids) + len(bench.question.token_ids)
    reusable = chunks * CHUNK_TOKENS
    reads = [("ram", geometry.layer_bytes(CHUNK_TOKENS))] * chunks
    resident = [bench.head, *bench.resident[:chunks], bench.question]
    quality = bench.config.quality_ratio

    def ttft(ratio: float) -> Callable[[], float]:
        def call() -> float:
            with bench.placed(chunks) as segments:
                return bench.fuse_s(segments, ratio, ThrottledLoader(bench.config, Throttle(rate)))

        return call

    def request() -> None:
        """What a service does with one: as planned, and the controller told."""
        made = controller.plan(reads, reusable, fresh)
        if made.full_recompute:
            controller.record(made, load_s=0.0, compute_s=bench.full_s(chunks))
            return
        with bench.placed(chunks) as segments, ThrottledLoader(bench.config, Throttle(rate)) as loader:
            started = time.perf_counter()
            fused = bench.fusor.fuse(segments, FusionConfig(recompute_ratio=made.ratio), loader)
            took_s = time.perf_counter() - started
        controller.record(made, load_s=loader.load_s, compute_s=took_s - fused.wait_s)

    def load_alone() -> float:
        with bench.placed(chunks) as segments:
            return bench.load_alone_s(segments, ThrottledLoader(bench.config, Throttle(rate)), layer_0=True)

    for _ in range(WINDOW):
        load_alone()  # what is measured below comes after a load too: after a second without work a prefill takes longer
        request()
    plan = controller.plan(reads, reusable, fresh)
    loading_is_longer = load_alone() > 0.8 * bench.fuse_s(resident, quality)  # elsewhere nothing can hide behind it
    searched_ratios = SEARCHED if options.search and (loading_is_longer or plan.ratio > quality) else ()
    wanted = sorted({*options.ratios, quality, plan.ratio, *searched_ratios})
    calls: dict[str, Callable[[], float]] = {"load": load_alone, "full": lambda: bench.full_s(chunks)}
    for ratio in wanted:
        calls[f"ttft {ratio}"] = ttft(ratio)
        calls[f"recompute {ratio}"] = lambda ratio=ratio: bench.fuse_s(resident, ratio)
    seconds = medians(calls, options.repeats)
    first_layer_s = seconds["load"] / (geometry.layers - 1)
    searched = [ratio for ratio in wanted if seconds[f"ttft {ratio}"] <= 1.05 * seconds[f"ttft {quality}"] and ratio >= quality]
    for ratio in wanted:
        controller.config = LoaderConfig(quality_ratio=ratio, max_ratio=ratio)
        predicted = controller.plan(reads, reusable, fresh)
        blend_s = predicted.full_s if predicted.full_recompute else predicted.prefill_s
        real_s = seconds["full"] if predicted.full_recompute else seconds[f"ttft {ratio}"]
        bound_s = max(seconds["load"], seconds[f"recompute {ratio}"]) + first_layer_s
        yield {
            "tokens": reusable + fresh,
            "rate": rate,
            "ratio": ratio,
            "ttft_s": seconds[f"ttft {ratio}"],
            "load_s": seconds["load"],
            "recompute_s": seconds[f"recompute {ratio}"],
            "full_s": seconds["full"],
            "over_bound": seconds[f"ttft {ratio}"] / bound_s,
            "prediction_error": abs(blend_s - real_s) / real_s,
            "predicted_full": predicted.full_recompute,
            "chosen": ratio == plan.ratio,
            "chosen_full": plan.full_recompute,
            "searched": max(searched),
            "over_quality": seconds[f"ttft {ratio}"] / seconds[f"ttft {quality}"],
        }


def grid(bench: Bench, profile: Profile, options: argparse.Namespace, rows: list[dict[str, Any]]) -> bool:
    """Add the rows of all lengths and rates, shown as they come; False where Ctrl-C ended it early."""
    points = [(length, rate) for length in options.lengths for rate in options.rates]
    try:
        for number, (length, rate) in enumerate(points, start=1):
            print(f"{number} of {len(points)}: {length} tokens at {rate / 1e6:g} MB/s", file=sys.stderr, flush=True)
            for row in overlap(bench, profile, max(1, length // CHUNK_TOKENS), rate, options):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return False
    return True


def main() -> None:
    """Measure and print."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."), help="a folder on the disk to measure")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 3072], help="chunk tokens of the prompts")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.15, 0.5])
    parser.add_argument("--rates", type=float, nargs="+", default=[20e6, 100e6, 500e6, 2e9], help="bytes per second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-search", dest="search", action="store_false", help="leave out the search for the hiding ratio")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fusor, config = make_fusor(), LoaderConfig()
    most = max(1, max(options.lengths) // CHUNK_TOKENS)
    summary: dict[str, Any] = {"threads": options.threads, "repeats": options.repeats}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-loader-") as scratch:
        folder = Path(scratch)
        with KVStore(StoreConfig(directory=folder / "kv")) as store:
            bench = Bench(fusor, store, config, most)
            store.flush()
            summary |= memory(bench, options.repeats)
            print(f"RAM over copy: {summary['ram_over_copy']:.2f}")
            profile = measure_profile(fusor, folder, config, lengths=sorted({512, *options.lengths}), repeats=options.repeats)
            rows: list[dict[str, Any]] = []
            summary["interrupted"] = not grid(bench, profile, options, rows)
        for direct in (True, False):
            summary |= disk(bench, folder, 3 * options.repeats, direct=direct)
        print(f"NVMe over {summary['nvme_peer']}: {summary['nvme_over_fio']:.2f}, cached: {summary['cached_over_fio']:.2f}")
    summary |= summarize(rows, config.quality_ratio)
    print(json.dumps(summary))


def summarize(rows: list[dict[str, Any]], quality: float) -> dict[str, Any]:
    """Worst and median of the grid."""
    blended = [row for row in rows if not row["predicted_full"]]
    chosen = [row for row in rows if row["chosen"] and not row["chosen_full"]]
    slower = [row for row in chosen if row["load_s"] > row["recompute_s"] or row["ratio"] > quality]
    at_quality = [row for row in rows if row["chosen_full"] and row["ratio"] == quality]
    bounds, errors = [row["over_bound"] for row in blended], [row["prediction_error"] for row in rows]
    return {
        "ttft_over_bound": max(bounds, default=None),
        "ttft_over_bound_median": statistics.median(bounds) if bounds else None,
        "ttft_prediction_error": max(errors, default=None),
        "ttft_prediction_error_median": statistics.median(errors) if errors else None,
        "ratio_over_search": min((row["ratio"] / row["searched"] for row in slower), default=None),
        "ttft_over_quality": max((row["over_quality"] for row in slower), default=None),
        "reuse_over_full": max((row["ttft_s"] / row["full_s"] for row in chosen), default=None),
        "full_over_reuse": max((row["full_s"] / row["ttft_s"] for row in at_quality), default=None),
        "below_quality": sum(row["ratio"] < quality for row in chosen),
        "points": len(rows),
    }


if __name__ == "__main__":
    main()
