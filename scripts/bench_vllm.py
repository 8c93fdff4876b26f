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
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("store", type=Path)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batched-tokens", type=int, default=2048, help="vLLM's --max-num-batched-tokens (default: %(default)s)"
    )
    parser.add_argument("--ratio", type=float, nargs="*", default=[], help="recompute ratios beside the default one")
    parser.add_argument("--dtype", default="float32", help="vLLM's (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="vLLM without the connector")
    options = parser.parse_args()

    from pydoc_data.topics import topics

    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "CacheBlendConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store_dir": str(options.store)},
    }
    tokens_in_all = options.chunks * options.chunk_tokens + 512
    llm = LLM(
        options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=tokens_in_all,
        max_num_batched_tokens=options.batched_tokens,
        disable_log_stats=True,
        **({} if options.plain else {"kv_transfer_config": transfer}),
    )
    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    text = tokenizer("\n".join(topic for _, topic in sorted(topics.items())), add_special_tokens=False)["input_ids"]
    head = tokenizer("Answer from the texts.\n\n")["input_ids"]
    question = tokenizer("\n\nQuestion: what is said of names?\nAnswer:", add_special_tokens=False)["input_ids"]
    pool = [text[i * options.chunk_tokens : (i + 1) * options.chunk_tokens] for i in range(options.chunks)]
    if not options.plain:
        while llm.collective_rpc("cacheblend_precompute", args=([[chunk] for chunk in pool], None, None))[0][1]:
            time.sleep(0.1)  # the disk is behind, and some are left

    def prompt(order: list[int]) -> tuple[list[int], list[list[int]]]:
        ids, spans = list(head), list[list[int]]()
        for index in order:
            spans.append([len(ids), len(ids) + len(pool[index])])
            ids += pool[index]
        return [*ids, *question], spans

    def params(spans: list[list[int]] | None, ratio: float | None, tokens: int) -> Any:
        marks = {"chunks": spans} if ratio is None else {"chunks": spans, "ratio": ratio}
        extra = {} if spans is None else {"kv_transfer_params": {"cacheblend": marks}}
        return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra)

    def ttft(ids: list[int], spans: list[list[int]] | None, ratio: float | None = None, *, cold: bool = True) -> float:
        if cold:
            llm.reset_prefix_cache()
        started = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": ids}], params(spans, ratio, 1), use_tqdm=False)
        took = time.perf_counter() - started
        if spans is not None:
            assert output.kv_transfer_params["cacheblend"]["blended"], output.kv_transfer_params
        return took

    def longest_pause(ids: list[int], spans: list[list[int]] | None) -> float:
        """Longest time between two tokens of a running request, while the prompt is prefilled or blended."""
        llm.reset_prefix_cache()
        engine.add_request("running", {"prompt_token_ids": head}, params(None, None, 200))
        for _ in range(8):
            engine.step()
        engine.add_request("prompt", {"prompt_token_ids": ids}, params(spans, None, 4))
        pauses, last, seen = [0.0], time.perf_counter(), 0
        while engine.has_unfinished_requests():
            outputs = {output.request_id: output for output in engine.step()}
            running = outputs.get("running")
            if running is not None and len(running.outputs[0].token_ids) > seen:
                seen, now = len(running.outputs[0].token_ids), time.perf_counter()
                pauses.append(now - last)
                last = now
            if "prompt" in outputs and outputs["prompt"].finished:
                engine.abort_request(["running"])
                break
        while engine.has_unfinished_requests():
            engine.step()
        return max(pauses[1:])

    draw, orders = random.Random(3), list[list[int]]()
    for _ in range(options.rounds + 1):
        order = list(range(options.chunks))
        draw.shuffle(order)
        orders.append(order)
    times: dict[str, list[float]] = {}
    for number, order in enumerate(orders):
        ids, spans = prompt(order)
        took = {"exact_s": ttft(ids, None)}
        took["prefix_cache_s"] = ttft(ids, None, cold=False)
        if not options.plain:
            took["blend_s"] = ttft(ids, spans)
            took |= {f"blend_{ratio}_s": ttft(ids, spans, ratio) for ratio in options.ratio}
        if number < 3:
            took["pause_exact_s"] = longest_pause(ids, None)
            if not options.plain:
                took["pause_blend_s"] = longest_pause(ids, spans)
        if number:  # the first warms up
            for name, seconds in took.items():
                times.setdefault(name, []).append(seconds)
        print({name: round(seconds, 3) for name, seconds in took.items()}, file=sys.stderr)
    result: dict[str, Any] = {"tokens": len(prompt(orders[0])[0]), "rounds": options.rounds, "plain": options.plain}
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
