"""Throughput of one vLLM engine on a shared corpus: its own prefix cache against blended chunks, at random arrivals.

    python scripts/bench_vllm_load.py MODEL STORE CASES.jsonl[.gz] [--rates 0.15 0.3] [--blend-rates 0.3 0.6 0.9 1.2]
        [--requests 12] [--ingest-only]

Run it in the environment that scripts/check_vllm.sh makes, first with `--ingest-only`. A case is one JSON object a line with
`question` and `passages` of `title` and `text`; a prompt is an instruction, the passages and the question. All passages are
stored ahead; the prefix cache has met `--warm-up` cases, and what the requests before leave. Arrivals are those of one Poisson
process, stretched to each rate.
Throughput at equal TTFT: of blended requests the largest whose median TTFT is no more than that of unmarked ones at a rate. The
last line is one JSON object.
"""

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and where its chunks stand."""

    token_ids: list[int]
    spans: list[list[int]]

    @property
    def chunks(self) -> list[list[int]]:
        """The chunks' token ids."""
        return [self.token_ids[start:stop] for start, stop in self.spans]


def read_cases(path: Path, tokenizer: Any, count: int) -> list[Case]:
    """The first cases of a file."""
    instruction = tokenizer("Answer the question from the texts.\n\n")["input_ids"]

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    cases: list[Case] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            tokens, spans = list(instruction), list[list[int]]()
            for passage in row["passages"]:
                chunk = ids(f"{passage['title']}\n{passage['text']}\n\n")
                spans.append([len(tokens), len(tokens) + len(chunk)])
                tokens += chunk
            cases.append(Case([*tokens, *ids(f"Question: {row['question']}\nAnswer:")], spans))
    return cases


class Load:
    """Requests to one engine, in this process.

    Args:
        llm: vLLM's.
        new_tokens: of each answer.
    """

    def __init__(self, llm: Any, new_tokens: int) -> None:
        self._llm, self._new_tokens, self._asked = llm, new_tokens, 0

    def run(self, cases: Sequence[Case], due_s: Sequence[float], *, marked: bool) -> dict[str, float]:
        """Ask the cases when they are due; gives median TTFT, throughput, and the share of prompt tokens that were cached."""
        from vllm import SamplingParams

        engine, started = self._llm.llm_engine, time.perf_counter()
        due_of, ttft_s, cached, waiting = dict[str, float](), dict[str, float](), 0, list(zip(due_s, cases, strict=True))
        ended = started
        while waiting or engine.has_unfinished_requests():
            while waiting and time.perf_counter() - started >= waiting[0][0]:
                due, case = waiting.pop(0)
                extra = {"kv_transfer_params": {"cacheblend": {"chunks": case.spans}}} if marked else {}
                params = SamplingParams(max_tokens=self._new_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
                self._asked += 1
                due_of[name := f"load-{self._asked}"] = started + due
                engine.add_request(name, {"prompt_token_ids": case.token_ids}, params)
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, started + waiting[0][0] - time.perf_counter()))
                continue
            for output in engine.step():
                now = time.perf_counter()
                if output.outputs[0].token_ids:
                    ttft_s.setdefault(output.request_id, now - due_of[output.request_id])
                if output.finished:
                    ended, cached = now, cached + (output.num_cached_tokens or 0)
        return {
            "ttft_s": round(statistics.median(ttft_s.values()), 3),
            "requests_per_s": round(len(cases) / (ended - started - due_s[0]), 3),
            "cached": round(cached / sum(len(case.token_ids) for case in cases), 3),
        }


def _arrivals(count: int) -> list[float]:
    """When so many requests arrive, at one a time unit in the mean."""
    draw, due = random.Random(5), [0.0]
    while len(due) < count:
        due.append(due[-1] + draw.expovariate(1.0))
    return [at * (count - 1) / due[-1] for at in due] if count > 1 else due


def _store_passages(llm: Any, cases: Sequence[Case]) -> int:
    """Store the KV of all passages; returns how many there are."""
    chunks = sorted({tuple(chunk) for case in cases for chunk in case.chunks})
    for number, chunk in enumerate(chunks):
        while llm.collective_rpc("cacheblend_precompute", args=([list(chunk)], [0], None))[0][1]:
            time.sleep(0.1)  # the disk is behind, and it is left
        if number % 50 == 49:
            print(f"{number + 1} of {len(chunks)} passages stored", file=sys.stderr, flush=True)
    return len(chunks)


def _at_equal_ttft(points: Mapping[str, Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """The largest throughput of blended requests at no more than the TTFT of unmarked ones, for each rate of those."""
    equal: list[dict[str, float]] = []
    for own in points["prefix_cache"]:
        blend = max((one["requests_per_s"] for one in points["blend"] if one["ttft_s"] <= own["ttft_s"]), default=0.0)
        times = round(blend / own["requests_per_s"], 2)
        equal.append({"ttft_s": own["ttft_s"], "prefix_cache": own["requests_per_s"], "blend": blend, "times": times})
    return equal


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("store", type=Path)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.15, 0.3], help="unmarked requests a second")
    parser.add_argument("--blend-rates", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2], help="marked ones")
    parser.add_argument("--requests", type=int, default=12, help="of each rate (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="cases (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=8, help="of each answer (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's (default: %(default)s)")
    parser.add_argument("--ingest-only", action="store_true", help="store the passages, and end")
    options = parser.parse_args()

    from vllm import LLM

    transfer = {
        "kv_connector": "CacheBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store_dir": str(options.store)},
    }
    llm = LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        disable_log_stats=True,
        kv_transfer_config=transfer,
    )
    rates = {"prefix_cache": options.rates, "blend": options.blend_rates}
    count = options.warm_up + options.requests * max(map(len, rates.values()))
    cases = read_cases(options.cases, llm.get_tokenizer(), count)
    tokens = statistics.mean(len(case.token_ids) for case in cases)
    passages, uses = _store_passages(llm, cases), sum(len(case.spans) for case in cases)
    print(f"{len(cases)} cases of {tokens:.0f} tokens, {uses} uses of {passages} passages", file=sys.stderr)
    if options.ingest_only:
        return 0
    load = Load(llm, options.new_tokens)
    due = _arrivals(options.requests)
    points: dict[str, list[dict[str, float]]] = {name: [] for name in rates}
    warm_up, measured = cases[: options.warm_up], cases[options.warm_up :]
    for name, found in points.items():
        marked = name == "blend"
        llm.reset_prefix_cache()  # which has the prompts' exact blocks
        load.run(warm_up, [0.0] * len(warm_up), marked=marked)
        for number, rate in enumerate(rates[name]):
            mine = measured[number * options.requests : (number + 1) * options.requests]
            found.append({"rate": rate, **load.run(mine, [at / rate for at in due[: len(mine)]], marked=marked)})
            print(name, found[-1], file=sys.stderr, flush=True)
    print(json.dumps({"prompt_tokens": round(tokens), "points": points, "at_equal_ttft": _at_equal_ttft(points)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
