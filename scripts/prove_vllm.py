"""Proofs of blending inside vLLM, over tiny random models: equal answers, and a hostile load that leaves nothing.

    python scripts/prove_vllm.py equality [--family llama ...] [--dtype float32 bfloat16] [--ranks 1 2] [--prompts 100]
    python scripts/prove_vllm.py load [--requests 500] [--family llama]

Run it in the environment that scripts/check_vllm.sh makes. `equality`: greedy tokens of mixed prompts that are blended at ratio
1.0 are vLLM's own. `load`: exact and blended prompts at once, some aborted and some preempted; each exact answer is that of
an engine without the connector, and no page, pin, file or thread stays. The last line is one JSON object; the exit code is 1
where a proof fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations" / "vllm"))

from vllm_engines import FAMILIES, VOCAB, Served, TinyModels, open_engine, store_chunks

DTYPES = ("float32", "bfloat16")
# Two answers may part where the two likeliest tokens are as close as rounding. Such places are counted; so are those where
# vLLM's own answer parts from itself.
TIE = {"float32": 1e-3, "bfloat16": 0.1}
MAX_PROMPT = 400
SMALL_KV_BLOCKS = 26
OTHER_STEP_TOKENS = 72


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A prompt of an opening, chunks, sometimes text between them, and a question."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class PromptMaker:
    """Draws prompts over a pool of chunks, most of which are stored.

    Args:
        seed: of all that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.chunks = [self._text(self._draw.randrange(20, 110)) for _ in range(12)]
        self._openings = [self._text(size) for size in (36, 40, 70)]

    @property
    def stored(self) -> list[list[int]]:
        """Chunks that are to be stored; the others are misses."""
        return self.chunks[:10]

    def draw(self) -> MixedPrompt:
        """A prompt that fits the engines."""
        while True:
            ids, spans = list(self._draw.choice(self._openings)), list[tuple[int, int]]()
            for chunk in self._draw.sample(self.chunks, self._draw.randrange(1, 5)):
                spans.append((len(ids), len(ids) + len(chunk)))
                ids += chunk
                if self._draw.random() < 0.3:
                    ids += self._text(self._draw.randrange(1, 12))
            ids += self._text(self._draw.randrange(1, 24))
            if len(ids) <= MAX_PROMPT:
                return MixedPrompt(tuple(ids), tuple(spans))

    def _text(self, tokens: int) -> list[int]:
        return [self._draw.randrange(2, VOCAB) for _ in range(tokens)]


def parting(exact: Any, other: Sequence[int]) -> tuple[int, float] | None:
    """Where an answer parts from the exact one, and by how much the exact one preferred its token there; None for nowhere."""
    for place, (mine, own) in enumerate(zip(other, exact.token_ids, strict=False)):
        if mine != own:
            return place, exact.logprobs[place][own].logprob - exact.logprobs[place][mine].logprob
    return None


def prove_equality(folder: Path, dtype: str, ranks: int, prompts: int, store: Path, new_tokens: int = 8) -> dict[str, Any]:
    """Greedy tokens of prompts blended at ratio 1.0 against vLLM's own, all prompts of a kind asked at once.

    The control: in how many prompts vLLM's own answer parts from itself where they are asked in another order, and their
    prefill is cut into other pieces.
    """
    from cacheblend.integrations.vllm import scheduler

    scheduler.LARGEST_SHARE = 9.0  # at ratio 1.0 a blend is no gain, and would be left to vLLM
    maker = PromptMaker(seed=7)
    drawn = [maker.draw() for _ in range(prompts)]
    with open_engine(folder, store, dtype=dtype, tensor_parallel_size=ranks) as served:
        plain = [[chunk] for chunk in maker.stored]
        store_chunks(served.llm, plain)
        wait_until_stored(served, maker.stored)
        exact = served.ask_all([(prompt.token_ids, None) for prompt in drawn], new_tokens=new_tokens)
        served.llm.reset_prefix_cache()
        whole_step, served.scheduler.max_num_scheduled_tokens = served.scheduler.max_num_scheduled_tokens, OTHER_STEP_TOKENS
        backwards = served.ask_all([(prompt.token_ids, None) for prompt in reversed(drawn)], new_tokens=new_tokens)
        served.scheduler.max_num_scheduled_tokens = whole_step
        served.llm.reset_prefix_cache()
        marked = [(prompt.token_ids, prompt.spans) for prompt in drawn]
        blended = served.ask_all(marked, ratio=1.0, new_tokens=new_tokens)
    result = Counter[str](prompts=len(drawn))
    for own, again, mine in zip(exact, reversed(backwards), blended, strict=True):
        result["own_partings"] += parting(own.outputs[0], again.outputs[0].token_ids) is not None
        result["blended"] += bool(mine.kv_transfer_params["cacheblend"]["blended"])
        found = parting(own.outputs[0], mine.outputs[0].token_ids)
        result["equal"] += found is None
        if found is not None:
            result["ties" if found[1] < TIE[dtype] else "different"] += 1
    names = ("prompts", "blended", "equal", "ties", "different", "own_partings")
    ok = result["different"] == 0 and result["blended"] > 0.8 * len(drawn)
    return {**{name: result[name] for name in names}, "ok": ok}


def wait_until_stored(served: Served, chunks: Sequence[Sequence[int]], deadline_s: float = 60) -> None:
    """Wait until the scheduler finds the chunks: the store writes in the background, and maybe in another process."""
    half = served.scheduler.connector._scheduler
    wanted = [half._keys.key(tuple(chunk), (), None) for chunk in chunks]
    deadline = time.monotonic() + deadline_s
    while not all(half._stored(wanted)):
        assert time.monotonic() < deadline, "chunks are not stored"
        time.sleep(0.05)


@dataclass(slots=True)
class Asked:
    """A request of the load."""

    prompt: MixedPrompt
    new_tokens: int
    marked: bool


def prove_load(folder: Path, requests: int, store: Path, seed: int = 11) -> dict[str, Any]:
    """Exact and blended requests with aborts and preemptions, against an engine without the connector."""
    from cacheblend.integrations.vllm import scheduler

    scheduler.LARGEST_SHARE = 9.0
    maker, draw = PromptMaker(seed), random.Random(seed)
    pool = [maker.draw() for _ in range(max(4, requests // 8))]
    asked = {
        f"{'marked' if marked else 'exact'}-{number}": Asked(draw.choice(pool), draw.choice([1, 8, 40]), marked)
        for number in range(requests)
        for marked in [draw.random() < 0.5]
    }
    with open_engine(folder, None) as plain:
        unique = sorted({one.prompt.token_ids for one in asked.values() if not one.marked})
        outputs = plain.ask_all([(ids, None) for ids in unique], new_tokens=40)
        reference = {ids: output.outputs[0] for ids, output in zip(unique, outputs, strict=True)}
    threads_before = {thread.ident for thread in threading.enumerate()}
    with open_engine(folder, store, num_gpu_blocks_override=SMALL_KV_BLOCKS, max_num_seqs=6) as served:
        served.precompute(*([chunk] for chunk in maker.stored))
        wait_until_stored(served, maker.stored)
        served.ask(pool[0].token_ids, pool[0].spans)  # what is opened once is open before things are counted
        served.llm.reset_prefix_cache()
        free, files = served.free_blocks(), _open_files()
        result = _run_load(served, asked, reference, draw)
        worker, half = served.connector._worker, served.scheduler.connector._scheduler
        left = {
            "requests": len(served.scheduler.requests) + len(half._marked) + len(half._reports),
            "blocks": free - served.free_blocks(),
            "blends": worker.blending + worker.waiting_misses,
            "pins": len(worker._store._pins._pinned),
            "files": len(_open_files() - files),
        }
    left["threads"] = sum(thread.ident not in threads_before and not thread.daemon for thread in threading.enumerate())
    left["part_files"] = sum(path.name.endswith((".tmp", ".part")) for path in store.rglob("*"))
    ok = not any(left.values()) and not result["different"] and not result["unanswered"] and result["preempted"] > 0
    ok = ok and result["aborted"] > requests // 20 and result["blended"] > requests // 8
    return {**result, "left": left, "ok": bool(ok)}


def _run_load(
    served: Served, asked: Mapping[str, Asked], reference: Mapping[tuple[int, ...], Any], draw: random.Random
) -> dict[str, int]:
    """Run the requests; gives counts of what became of them."""
    from vllm import SamplingParams

    engine, done, count = served.llm.llm_engine, dict[str, Any](), Counter[str]()
    seen_preemptions = Counter[str]()

    def step() -> None:
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        for request in served.scheduler.requests.values():
            seen_preemptions[request.request_id] = max(seen_preemptions[request.request_id], request.num_preemptions)

    added, gone = list[str](), set[str]()
    for name, one in asked.items():
        marks = {"chunks": one.prompt.spans, "ratio": draw.choice([None, 0.05, 0.5, 1.0])}
        extra = {"kv_transfer_params": {"cacheblend": marks}} if one.marked else {}
        params = SamplingParams(max_tokens=one.new_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        engine.add_request(name, {"prompt_token_ids": list(one.prompt.token_ids)}, params)
        served.connector._rows = draw.choice([0, 64, 256])  # from one layer a step to whole blends
        for _ in range(draw.randrange(12)):
            step()
        added.append(name)
        if draw.random() < 0.2 and (open_ones := [name for name in added if name not in done and name not in gone]):
            gone.add(chosen := draw.choice(open_ones))
            engine.abort_request([chosen])
    deadline = time.monotonic() + 240
    while engine.has_unfinished_requests() and time.monotonic() < deadline:
        step()
    for _ in range(64):  # missed chunks are computed at idle steps, one each
        engine.engine_core.get_output()
    served.connector._worker._store.flush()
    for name, one in asked.items():
        if name in gone:
            count["aborted"] += 1
        elif name not in done:
            count["unanswered"] += 1
        elif one.marked:
            count["blended"] += bool(done[name].kv_transfer_params["cacheblend"]["blended"])
            count["unanswered"] += len(done[name].outputs[0].token_ids) != one.new_tokens
        else:
            found = parting(reference[one.prompt.token_ids], done[name].outputs[0].token_ids)
            count["exact"] += 1
            if found is not None:
                count["ties" if found[1] < TIE["float32"] else "different"] += 1
    count["preempted"] = sum(1 for times in seen_preemptions.values() if times)
    names = ("exact", "blended", "aborted", "preempted", "unanswered", "ties", "different")
    return {"requests": len(asked), **{name: count[name] for name in names}}


def _open_files() -> set[str]:
    """What this process has open, but for pipes and sockets."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the folder's own, closed by now
            continue
    return {name for name in found if name.startswith("/") and not name.startswith("/dev/")}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proof", choices=("equality", "load"))
    parser.add_argument("--family", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder) / "models")
        if options.proof == "load":
            results["load"] = prove_load(models(options.family[0]), options.requests, Path(folder) / "store")
        else:
            for family in options.family:
                for dtype in options.dtype:
                    for ranks in options.ranks:
                        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
                        name, model = f"{family} {dtype} x{ranks}", models(family, getattr(torch, dtype))
                        results[name] = prove_equality(model, dtype, ranks, options.prompts, Path(folder) / "stores" / name)
                        print(name, results[name], file=sys.stderr, flush=True)
    ok = all(result["ok"] for result in results.values())
    print(json.dumps({"proof": options.proof, "ok": ok, "results": results}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
