"""Time to the first token in vLLM: its own cold prefill, its prefix cache, and blended chunks in another order each time.

    python scripts/bench_vllm.py MODEL STORE [--chunks 6] [--chunk-tokens 500] [--rounds 5] [--plain]

Run it in the environment that scripts/check_vllm.sh makes. All is measured by turns in one engine; `--plain` runs it without
the connector, for what an unmarked request takes then. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
PAUSE_ROUNDS = 3  # the first one warms up


def open_llm(options: argparse.Namespace) -> Any:
    """Open an engine of vLLM."""
    from vllm import LLM

    transfer = {
        "kv_connector": "CacheBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store_dir": str(options.store)},
    }
    return LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=options.chunks * options.chunk_tokens + 512,
        max_num_batched_tokens=options.batched_tokens,
        disable_log_stats=True,
        **({} if options.plain else {"kv_transfer_config": transfer}),
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts over the same chunks, in one order or another."""

    head: list[int]
    chunks: list[list[int]]
    question: list[int]

    @classmethod
    def of(cls, tokenizer: Any, chunks: int, chunk_tokens: int) -> Prompts:
        """Chunks of Python's own help."""
        text = tokenizer("\n".join(topic for _, topic in sorted(topics.items())), add_special_tokens=False)["input_ids"]
        return cls(
            tokenizer("Answer from the texts.\n\n")["input_ids"],
            [text[i * chunk_tokens : (i + 1) * chunk_tokens] for i in range(chunks)],
            tokenizer("\n\nQuestion: what is said of names?\nAnswer:", add_special_tokens=False)["input_ids"],
        )

    def ordered(self, order: list[int]) -> tuple[list[int], list[list[int]]]:
        """The prompt over chunks in an order, and where they stand."""
        ids, spans = list(self.head), list[list[int]]()
        for index in order:
            spans.append([len(ids), len(ids) + len(self.chunks[index])])
            ids += self.chunks[index]
        return [*ids, *self.question], spans


def _params(spans: list[list[int]] | None, tokens: int, ratio: float | None = None) -> Any:
    from vllm import SamplingParams

    extra = {} if spans is None else {"kv_transfer_params": {"cacheblend": {"chunks": spans, "ratio": ratio}}}
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra)


def ttft_s(
    llm: Any, ids: list[int], spans: list[list[int]] | None = None, ratio: float | None = None
) -> tuple[float, dict[str, Any]]:
    """Seconds to the first token, blended where spans are given; and the connector's report."""
    started = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": ids}], _params(spans, 1, ratio), use_tqdm=False)
    took_s = time.perf_counter() - started
    report = output.kv_transfer_params["cacheblend"] if spans else {}
    assert report.get("blended", True), report
    return took_s, report


def longest_pause_s(llm: Any, head: list[int], ids: list[int], spans: list[list[int]] | None) -> float:
    """Longest time between two tokens of a running request, while the prompt is prefilled or blended."""
    engine = llm.llm_engine
    engine.add_request("running", {"prompt_token_ids": head}, _params(None, 200))
    for _ in range(8):
        engine.step()
    engine.add_request("prompt", {"prompt_token_ids": ids}, _params(spans, 4))
    pauses_s, last, seen = [0.0], time.perf_counter(), 0
    while engine.has_unfinished_requests():
        outputs = {output.request_id: output for output in engine.step()}
        running = outputs.get("running")
        if running is not None and len(running.outputs[0].token_ids) > seen:
            seen, now = len(running.outputs[0].token_ids), time.perf_counter()
            pauses_s.append(now - last)
            last = now
        if "prompt" in outputs and outputs["prompt"].finished:
            engine.abort_request(["running"])
            break
    while engine.has_unfinished_requests():
        engine.step()
    return max(pauses_s[1:])


def measure(llm: Any, prompts: Prompts, order: list[int], options: argparse.Namespace, *, pauses: bool) -> dict[str, float]:
    """Seconds of each way, by name."""
    ids, spans = prompts.ordered(order)
    llm.reset_prefix_cache()
    took = {name: ttft_s(llm, ids)[0] for name in ("exact_s", "prefix_cache_s")}
    for ratio in [] if options.plain else [None, *options.ratio]:
        llm.reset_prefix_cache()
        seconds, report = ttft_s(llm, ids, spans, ratio)
        name = "widened" if report.get("widened") else "blend" if ratio is None else f"blend_{ratio}"
        took[f"{name}_s"] = seconds
    for name, marks in (("pause_exact_s", None), ("pause_blend_s", spans)) if pauses else ():
        if name == "pause_exact_s" or not options.plain:
            llm.reset_prefix_cache()
            took[name] = longest_pause_s(llm, prompts.head, ids, marks)
    return took


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("store", type=Path)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batched-tokens", type=int, default=2048, help="--max-num-batched-tokens (default: %(default)s)")
    parser.add_argument("--ratio", type=float, nargs="*", default=[], help="recompute ratios beside the default one")
    parser.add_argument("--dtype", default="float32", help="vLLM's (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="vLLM without the connector")
    options = parser.parse_args()
    llm = open_llm(options)
    prompts = Prompts.of(llm.get_tokenizer(), options.chunks, options.chunk_tokens)
    for chunk in [] if options.plain else prompts.chunks:
        while llm.collective_rpc("cacheblend_precompute", args=([chunk], [0], None))[0][1]:
            time.sleep(0.1)  # the disk is behind, and it is left
    draw, order, times = random.Random(3), list[int](), dict[str, list[float]]()
    for number in range(options.rounds + 1):
        order = list(range(options.chunks))
        draw.shuffle(order)
        took = measure(llm, prompts, order, options, pauses=number < PAUSE_ROUNDS)
        for name, seconds in took.items() if number else ():  # the first warms up
            times.setdefault(name, []).append(seconds)
        print({name: round(seconds, 3) for name, seconds in took.items()}, file=sys.stderr)
    result: dict[str, Any] = {"tokens": len(prompts.ordered(order)[0]), "rounds": options.rounds, "plain": options.plain}
    for name, seconds in times.items():
        result[name] = round(statistics.median(seconds), 3)
        result[f"{name.removesuffix('_s')}_spread_s"] = [round(min(seconds), 3), round(max(seconds), 3)]
    if "blend_s" in times:
        result["speed_up"] = round(result["exact_s"] / result["blend_s"], 2)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
