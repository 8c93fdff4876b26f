"""Many clients at one server for minutes, on a store that evicts all the time; then nothing may be left over, or wrong.

    python scripts/soak.py                  # 32 clients, 5 minutes

A server process with a small random model (weights scaled up, so that a fault in mask, rotation or cache shows) is asked over
HTTP in every way at once (`tests/service/load_mix.py`): chats over documents of their own, by retrieval and in several turns,
text completions, clients that go away before or in the middle of an answer, rubbish, uploads, replacements, deletions. RAM
and NVMe budgets hold a small part of the chunks. What must hold, else the exit code is 1:

`faults`: none: no status but those that docs/service.md names for the request, no 5xx, no stream that breaks off.
`exit_code`: 0, at a SIGTERM after it all; `damaged`: no entry of the store that it leaves.
`left_over`: after the load and a pause, open files, threads, pins, prefix blocks in use, running and waiting requests and
their objects in memory are no more than before the load (after a short one, which starts the threads that are kept).
`resident_growth_mib`: the load comes in `ROUNDS` rounds, and after each, with nothing asked, garbage collected and malloc
trimmed, VmRSS is taken (`resident_mib`). The median of the last half less that of the first half is at most `GROWTH` of the
latter. `loaded_mib`, the median VmRSS of each tenth of the load, is told and not judged: the allocator keeps the most that was
ever in use at once, in each of its arenas.
`differs`: of `replays` greedy answers drawn from all that were finished, how many are not what a replay of their recorded plan
alone gives, in this process, from KV that is computed anew. A difference where the replay's two best logits are closer than
0.001 counts under `ties`. `not_recorded`: greedy answers that clients got and the server did not record.

`answers` finished, `evictions` by tier, and `requests` by kind and `statuses` tell what went on. The last stdout line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "service"))

import httpx
from engines import CHUNK_TOKENS, make_model
from load_mix import LoadMix
from recorded import RecordedAnswer, check_replay
from server_process import ServedConfig, ServerProcess, free_port, resident_bytes

from cacheblend.blend import Fusor
from cacheblend.service.http.body import SMALL_BYTES
from cacheblend.store import KVStore, StoreConfig

JSON = {"Content-Type": "application/json"}
POSITIONS = 2048
ENTRY_BYTES = 32 * 2**10  # of a chunk, about
WARM_UP = 0.1  # of the load's seconds
WARM_UP_S = 3.0  # at least: the threads that are kept start in it
ROUNDS = 6
ROUND_S = 5.0  # at least; a short load has fewer rounds, at least two
GROWTH = 0.02
SETTLE_S = 30.0
SYSTEMS = {"open_files", "threads", "resident_bytes"}  # of `held`, those that are never 0


async def watch(server: ServerProcess, load: LoadMix, seconds: float) -> list[int]:
    """Run the load; gives VmRSS in bytes, twice a second."""
    samples: list[int] = []
    running = asyncio.create_task(load.run(seconds))
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        samples.append(resident_bytes(server.pid))
    await running
    return samples


def settle(server: ServerProcess, before: dict[str, int] | None) -> dict[str, int]:
    """What the server holds once it holds no more than `before`, or no request, or after `SETTLE_S`."""
    until = time.monotonic() + SETTLE_S
    while True:
        # Refused; reading a body that is not small in a worker thread also lets idle ones go.
        httpx.post(f"{server.address}/v1/documents", content=b'{"documents": [' + b" " * 2 * SMALL_BYTES, headers=JSON)
        held = server.held()
        wanted = before or dict.fromkeys(held.keys() - SYSTEMS, 0)
        if all(held[name] <= wanted[name] for name in wanted.keys() - {"resident_bytes"}) or time.monotonic() > until:
            return held
        time.sleep(0.5)


def replay(model: Path, answers: Path, texts: Counter[str], count: int, seed: int) -> dict[str, int]:
    """Replay a sample of the recorded answers; see the module's docstring."""
    recorded = [RecordedAnswer.from_line(line) for line in answers.read_text().splitlines()]
    verdicts: Counter[str] = Counter()
    fusor = Fusor.from_pretrained(str(model))
    candidates = [one for one in recorded if one.can_be_replayed]
    for one in random.Random(seed).sample(candidates, min(count, len(candidates))):
        verdict = check_replay(fusor, one)
        verdicts[verdict] += 1
        if verdict == "differs":
            print(f"not its replay: {one.line()[:2000]}", file=sys.stderr)
    return {
        "answers": len(recorded),
        "replays": verdicts.total(),
        "equal": verdicts["equal"],
        "ties": verdicts["tie"],
        "differs": verdicts["differs"],
        "not_replayable": len(recorded) - len(candidates),
        "not_recorded": (texts - Counter(one.text for one in recorded)).total(),
    }


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start, load, look, stop, replay; the figures."""
    model, answers = folder / "model", folder / "answers.jsonl"
    make_model(model, POSITIONS)
    config = ServedConfig(
        model=str(model),
        store_dir=str(folder / "store"),
        port=free_port(),
        chunk_tokens=CHUNK_TOKENS,
        ram_budget_bytes=80 * ENTRY_BYTES,
        nvme_budget_bytes=320 * ENTRY_BYTES,
        prefix_budget_bytes=2**20,
        max_num_seqs=12,
        max_waiting=24,
        answers=str(answers),
    )
    server = ServerProcess(config, folder / "server.log")
    with server:
        load = LoadMix(server.address, options.streams, options.seed)
        with asyncio.Runner() as runner:
            runner.run(load.fill())
            runner.run(load.run(max(WARM_UP_S, WARM_UP * options.seconds)))
            before = settle(server, None)
            print(f"warm: {before}", file=sys.stderr)
            rounds = max(2, min(ROUNDS, int(options.seconds / ROUND_S)))
            samples, quiet = list[int](), list[int]()
            for _ in range(rounds):
                samples += runner.run(watch(server, load, options.seconds / rounds))
                quiet.append(settle(server, None)["resident_bytes"])
            runner.run(load.close())
        after = settle(server, before)
        store = httpx.get(f"{server.address}/v1/store").json()
    with KVStore(StoreConfig(directory=folder / "store" / "kv")) as kept:
        damaged = len(kept.verify().damaged)
    first, last = median(quiet[: rounds // 2]), median(quiet[-(rounds // 2) :])
    return {
        "seconds": options.seconds,
        "streams": options.streams,
        "requests": dict(load.seen.requests),
        "statuses": {str(status): count for status, count in sorted(load.seen.statuses.items())},
        "faults": len(load.seen.faults),
        "first_faults": load.seen.faults[:5],
        "exit_code": server.exit_code,
        "damaged": damaged,
        "evictions": {tier: store[tier]["evictions"] for tier in ("ram", "nvme")},
        "hits": {tier: store[tier]["hits"] for tier in ("ram", "nvme")},
        "before": before,
        "after": after,
        "left_over": {
            name: after[name] - before[name] for name in after.keys() - {"resident_bytes"} if after[name] > before[name]
        },
        "resident_mib": [round(one / 2**20, 1) for one in quiet],
        "resident_growth_mib": round((last - first) / 2**20, 2),
        "memory_flat": last - first <= GROWTH * first,
        "loaded_mib": tenths(samples),
        **replay(model, answers, load.seen.texts, options.replays, options.seed),
    }


def tenths(samples: list[int]) -> list[float]:
    """The median of each tenth, in MiB."""
    size = len(samples) // 10
    return [round(median(samples[start * size : (start + 1) * size]) / 2**20, 1) for start in range(10) if size]


def holds(figures: dict[str, Any]) -> bool:
    """Whether all of it is as it must be."""
    nothing = ("faults", "damaged", "left_over", "differs", "not_recorded")
    busy = figures["replays"] and all(figures["evictions"].values())
    return bool(figures["exit_code"] == 0 and figures["memory_flat"] and busy and not any(figures[name] for name in nothing))


def main() -> int:
    """Run it; 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--replays", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for model, store, log and answers, which then stays")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        figures = run(options.keep, options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(Path(folder), options)
    print(json.dumps({**figures, "holds": holds(figures)}))
    return 0 if holds(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
