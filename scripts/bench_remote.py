"""The remote tier against the raw client, and blends whose KV is all remote against what load and compute allow.

    python scripts/bench_remote.py throughput         # Redis, S3 and a folder, against what reads them without us
    python scripts/bench_remote.py ttft --repeats 3   # on a quiet machine

`throughput`: bytes a second of `LayerLoader` over 64 chunks with 1 MiB a layer, checks and the way to the prompt's buffers
included, over what the raw client reads of the very objects that the tier reads, layer by layer, in pieces of the same size:
redis-py with pipelined GETRANGE, obstore with as many requests under way, and plain reads of the folder. The S3 server is
moto, in Python. By turns, medians.

`ttft`: an engine whose RAM and NVMe hold nothing asks a throttled Redis (`throttle_proxy.py`) for all of its KV. Beside its
TTFT stand `load_s`, look-up and loading alone; `recompute_s`, the same blend with all KV in RAM; `full_s`, full recompute.
`over_bound` is TTFT over the larger of the first two, or over full recompute where that is less than both: what could be
reached. `over_full` is TTFT over full recompute. `first` is the first request after the network changed, which nobody could
foresee.

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import redis
import torch
from obstore.store import from_url

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from remote_servers import s3_server

from cacheblend import Answer, Engine, EngineConfig
from cacheblend.blend import Prompt, Segment
from cacheblend.blend.layer_source import KVGeometry
from cacheblend.loader import LayerLoader, LoaderConfig, measure_profile, write_profile
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig
from cacheblend.store.remote.object_backend import REQUESTS

GEOMETRY = KVGeometry(layers=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"))
TOKENS, CHUNKS = 256, 64
LAYER_BYTES = 2**20  # of a chunk
TOTAL_BYTES = CHUNKS * GEOMETRY.layers * LAYER_BYTES
FIRST_BYTE = 4096  # where about an object's first layer begins
QUESTION = "Who signs off travel, and how long is probation?"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def process(*command: str, port: int) -> Iterator[None]:
    """A server, until the block ends; begun once it listens."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        try:
            for _ in range(500):
                try:
                    socket.create_connection(("127.0.0.1", port), 0.1).close()
                    break
                except OSError:
                    time.sleep(0.01)
            yield
        finally:
            running.kill()


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """A Redis on loopback; gives its port."""
    port = free_port()
    with process("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), port=port):
        yield port


def throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every backend against its client."""
    rows = []
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        port = opened.enter_context(redis_server(folder))
        s3_url = opened.enter_context(s3_server(folder))
        for backend, url, secret, raw in (
            ("redis", f"redis://127.0.0.1:{port}/0", None, raw_redis),
            ("redis", f"redis://127.0.0.1:{port}/1", "a secret of sixteen characters", raw_redis),
            ("s3", s3_url, None, raw_s3),
            ("folder", f"file://{folder}/objects", None, raw_folder),
        ):
            keys = fill(folder, url, secret)
            seconds: dict[str, list[float]] = {"raw": [], "tier": []}
            for repeat in range(options.repeats + 1):
                took = {"raw": raw(url), "tier": load_s(folder, url, secret, keys)}
                for side, took_s in took.items() if repeat else ():
                    seconds[side].append(took_s)
            rates = {side: TOTAL_BYTES / statistics.median(found) for side, found in seconds.items()}
            row = {"backend": backend, "secret": secret is not None, **rates, "ratio": rates["tier"] / rates["raw"]}
            row["spread"] = {side: [TOTAL_BYTES / max(found), TOTAL_BYTES / min(found)] for side, found in seconds.items()}
            print(row, file=sys.stderr)
            rows.append(row)
    return rows


def raw_redis(url: str) -> float:
    """Seconds of redis-py to read all layers of all values, a pipeline a layer."""
    client = redis.Redis.from_url(url, socket_read_size=2**20)  # as the backend has it
    names = sorted(client.scan_iter())
    assert len(names) == CHUNKS
    started, count = time.perf_counter(), 0
    for layer in range(GEOMETRY.layers):
        with client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.getrange(name, FIRST_BYTE + layer * LAYER_BYTES, FIRST_BYTE + (layer + 1) * LAYER_BYTES - 1)
            count += sum(map(len, pipeline.execute()))
    assert count == TOTAL_BYTES
    return time.perf_counter() - started


def raw_s3(url: str) -> float:
    """Seconds of obstore to read all layers of all objects, layer by layer."""
    store = from_url(url, client_options={"allow_http": True})
    paths = [found["path"] for page in obstore.list(store) for found in page]
    assert len(paths) == CHUNKS

    async def read_all() -> int:
        slots = asyncio.Semaphore(REQUESTS)

        async def read(path: str, layer: int) -> int:
            async with slots:
                start = FIRST_BYTE + layer * LAYER_BYTES
                return len(await obstore.get_range_async(store, path, start=start, length=LAYER_BYTES))

        counts = [await asyncio.gather(*(read(path, layer) for path in paths)) for layer in range(GEOMETRY.layers)]
        return sum(map(sum, counts))

    started = time.perf_counter()
    assert asyncio.run(read_all()) == TOTAL_BYTES
    return time.perf_counter() - started


def raw_folder(url: str) -> float:
    """Seconds to read all layers of all files, layer by layer."""
    files = sorted(path for path in Path(urlsplit(url).path).rglob("*") if path.is_file())
    assert len(files) == CHUNKS
    started = time.perf_counter()
    for layer in range(GEOMETRY.layers):
        layers = []
        for path in files:
            with path.open("rb") as file:
                file.seek(FIRST_BYTE + layer * LAYER_BYTES)
                layers.append(file.read(LAYER_BYTES))
        assert sum(map(len, layers)) == CHUNKS * LAYER_BYTES
    return time.perf_counter() - started


def fill(folder: Path, url: str, secret: str | None) -> list[ChunkKey]:
    """Write the chunks to a remote tier."""
    keys = []
    config = StoreConfig(directory=folder / "filled", ram_budget_bytes=1, remote=url, remote_secret=secret)
    with KVStore(config) as store:
        store.clear()
        assert store.remote is not None
        for number in range(CHUNKS):
            ids = [number * TOKENS + place for place in range(TOKENS)]
            layers = [tuple(torch.randn(8, TOKENS, 128).bfloat16() for _ in "kv") for _ in range(GEOMETRY.layers)]
            kv = ChunkKV([(k_HTD, v_HTD) for k_HTD, v_HTD in layers], ids, (), "bench")
            keys.append(ChunkKey.of(ids, model="bench"))
            store.put(keys[-1], kv)
            store.flush_remote()
        assert store.stats().remote.sent >= CHUNKS, store.stats().remote  # type: ignore[union-attr]  # it has one
    return keys


def load_s(folder: Path, url: str, secret: str | None, keys: list[ChunkKey]) -> float:
    """Seconds to have every layer of all chunks in the prompt's buffers, layer by layer; the look-up is not in it."""
    config = StoreConfig(directory=folder / "empty", ram_budget_bytes=1, nvme_budget_bytes=1, remote=url, remote_secret=secret)
    loader_config = LoaderConfig(lookahead_bytes=2 * CHUNKS * 2**20)
    with KVStore(config) as store, store.pin(keys) as placements, LayerLoader(loader_config) as loader:
        found = [placement for placement in placements if placement is not None and placement.tier == "remote"]
        assert len(found) == len(keys), len(found)
        prompt = Prompt.of([*(Segment(placement.token_ids, placement) for placement in found), Segment([0])])
        started = time.perf_counter()
        loader.start(prompt, GEOMETRY, reuse_layer_0=True)
        layers = [loader.synchronize(layer) for layer in range(GEOMETRY.layers)]
        took_s = time.perf_counter() - started
        del layers
        return took_s


def ttft(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Blends over a throttled Redis."""
    handbook = Path(__file__).parents[1] / "eval" / "handbook"
    pages = sorted(handbook.glob("*.md"))[: options.pages]
    documents = [{"title": page.stem, "text": page.read_text()} for page in pages]
    rows = []
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        port = opened.enter_context(redis_server(folder))
        config = EngineConfig(model=options.model, store_dir=folder / "resident", max_tokens=1, dtype=options.dtype)
        resident = opened.enter_context(Engine(replace(config, store=StoreConfig(remote=f"redis://127.0.0.1:{port}/0"))))
        if options.profiles is None or not options.profiles.exists():
            print("profile", file=sys.stderr)
            profile = measure_profile(resident.fusor, config.profile_dir, config.loader, lengths=options.lengths, repeats=3)
            write_profile(config.profile_dir, profile)
            if options.profiles is not None:
                shutil.copytree(config.profile_dir, options.profiles)
        else:
            shutil.copytree(options.profiles, config.profile_dir, dirs_exist_ok=True)
        resident.answer(QUESTION, documents=documents, method="blend", recompute_ratio=0.15)
        resident.background.drain()
        assert resident.store.flush_remote(60)
        shutil.copytree(config.profile_dir, folder / "remote" / "profiles")
        proxy_port = free_port()
        store = StoreConfig(ram_budget_bytes=1, nvme_budget_bytes=1, remote=f"redis://127.0.0.1:{proxy_port}/0")
        engine = opened.enter_context(Engine(replace(config, store_dir=folder / "remote", store=store), fusor=resident.fusor))
        for rate, latency_s in [(rate, latency_s) for rate in options.rates for latency_s in options.latencies]:
            command = [sys.executable, str(Path(__file__).with_name("throttle_proxy.py")), f"127.0.0.1:{proxy_port}"]
            command += [f"127.0.0.1:{port}", "--rate", str(rate), "--latency", str(latency_s)]
            with process(*command, port=proxy_port):
                rows.append({"rate": rate, "latency_s": latency_s, **one_network(engine, resident, documents, options)})
                print(rows[-1], file=sys.stderr)
    return rows


def one_network(
    engine: Engine, resident: Engine, documents: list[dict[str, str]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians, by turns, over one network. What is known of the entries is forgotten before each request."""
    seconds: dict[str, list[float]] = {"ttft_s": [], "load_s": [], "recompute_s": [], "full_s": []}
    again = resident.answer(QUESTION, documents=documents, recompute_ratio=engine.config.loader.quality_ratio)
    keys = {key for segment in again.plan.segments if (key := segment.key) is not None}
    wanted = [entry.key for entry in resident.store.ls() if str(entry.key) in keys]
    first = asked(engine, wanted, documents)
    for _ in range(2):
        asked(engine, wanted, documents)
    for _ in range(options.repeats):
        answer = asked(engine, wanted, documents)
        assert engine.store.stats().remote.state == "closed", engine.store.stats().remote  # type: ignore[union-attr]  # it has one
        loading = answer.plan.loading
        assert loading is not None, "there is a profile"
        again = resident.answer(QUESTION, documents=documents, recompute_ratio=loading.ratio)
        seconds["ttft_s"].append(answer.timings.ttft_s)
        seconds["recompute_s"].append(again.timings.ttft_s)
        seconds["full_s"].append(engine.answer(QUESTION, documents=documents, method="full_recompute").timings.ttft_s)
        seconds["load_s"].append(alone_s(engine, wanted))
    found = {name: statistics.median(values) for name, values in seconds.items()}
    bound = min(max(found["load_s"], found["recompute_s"]), found["full_s"])
    return {
        **found,
        "over_bound": found["ttft_s"] / bound,
        "over_full": found["ttft_s"] / found["full_s"],
        "first_over_full": first.timings.ttft_s / found["full_s"],
        "plan": "full" if loading.full_recompute else f"{loading.ratio}, {loading.front_chunks} chunks computed in front",
        "predicted_s": loading.prefill_s,
        "prompt_tokens": sum(len(segment.token_ids) for segment in answer.plan.segments),
        "hits_by_tier": sorted({str(segment.tier) for segment in answer.plan.segments}),
    }


def forget(engine: Engine, keys: Sequence[ChunkKey]) -> None:
    """Have entries looked up anew."""
    assert engine.store.remote is not None
    for key in keys:
        engine.store.remote.forget(key.digest)


def asked(engine: Engine, keys: Sequence[ChunkKey], documents: list[dict[str, str]]) -> Answer:
    """An answer whose chunks are looked up anew."""
    forget(engine, keys)
    return engine.answer(QUESTION, documents=documents)


def alone_s(engine: Engine, keys: Sequence[ChunkKey]) -> float:
    """Seconds of look-up and loading with nothing beside them."""
    while True:
        forget(engine, keys)
        started = time.perf_counter()
        with engine.store.pin(keys) as placements, LayerLoader(engine.config.loader) as loader:
            found = [placement for placement in placements if placement is not None]
            if len(found) < len(keys):  # the network has become slower than a look-up has patience for
                continue
            prompt = Prompt.of([*(Segment(placement.token_ids, placement) for placement in found), Segment([0])])
            geometry = engine.fusor.decoder.geometry
            loader.start(prompt, geometry, reuse_layer_0=False)
            layers = [loader.synchronize(layer) for layer in range(geometry.layers)]
            took_s = time.perf_counter() - started
            del layers
        return took_s


def main() -> None:
    """Run one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "ttft"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pages", type=int, default=6, help="of the handbook, in the prompt")
    parser.add_argument("--profiles", type=Path, help="a folder that keeps the measured profile for the next run")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1536, 3072])
    parser.add_argument("--rates", type=float, nargs="+", default=[20e6, 100e6, 500e6])
    parser.add_argument("--latencies", type=float, nargs="+", default=[0.0, 0.05])
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(options.threads)
    rows = throughput(options) if options.what == "throughput" else ttft(options)
    print(json.dumps({"what": options.what, "threads": options.threads, "rows": rows}))


if __name__ == "__main__":
    main()
