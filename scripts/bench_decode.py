"""Decoding: seconds a step, and tokens a second, for several sequences at once.

    python scripts/bench_decode.py --model smollm2-135m                       # ours, and transformers' generate
    python scripts/bench_decode.py --model DIR --dtype bfloat16 --vllm         # vLLM, in the environment of check_vllm.sh

Ours is `ModelRunner.decode`, a step of all sequences, as the scheduler takes it, and the largest logit of each; transformers'
is `model.generate` of a batch of prompts of the same length, greedily, without its prefill; vLLM's is its engine's step once
all prompts are prefilled. Every sequence has `--tokens` tokens before it. Medians over the steps. The last
line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

Seconds = dict[str, dict[int, float]]  # of a step, by engine and number of sequences


def decode_ours(
    model: str, dtype: str, tokens: int, counts: list[int], steps: int, threads: int, *, peers: bool
) -> dict[str, dict[int, float]]:
    """Median seconds of a step, ours and transformers', by the number of sequences."""
    import torch

    from cacheblend.blend import Fusor, Segment
    from cacheblend.blend.generation import SequenceKV

    torch.set_num_threads(threads)
    fusor = Fusor.from_pretrained(model, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, fusor.decoder.vocab_size, (tokens,), generator=generator).tolist() for _ in range(max(counts))]
    prefilled = [fusor.fuse([Segment(prompt)]) for prompt in prompts]
    seconds: dict[str, dict[int, float]] = {"ours": {}, "generate": {}}
    for count in counts:
        sequences = [SequenceKV(fused, fusor.decoder.windows) for fused in prefilled[:count]]
        last = [int(fused.logits.argmax()) for fused in prefilled[:count]]
        took: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            last = fusor.decoder.decode(last, sequences).argmax(dim=-1).tolist()
            took.append(time.perf_counter() - began)
        seconds["ours"][count] = statistics.median(took)
        if peers:
            seconds["generate"][count] = _generate(fusor.model, torch.tensor(prompts[:count]), steps)
    return seconds


def _generate(model: Any, prompts_RN: Any, steps: int) -> float:
    """Median seconds between two tokens of `model.generate`."""
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.ticks: list[float] = []

        def put(self, value: Any) -> None:
            self.ticks.append(time.perf_counter())

        def end(self) -> None:
            pass

    if len(prompts_RN) == 1:
        clock = Clock()
        model.generate(prompts_RN, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, streamer=clock)
        ticks = clock.ticks[1:]  # the first is the prompt's own
        return statistics.median(after - before for before, after in pairwise(ticks))
    took: dict[int, float] = {}  # a streamer takes one sequence alone: two lengths, and their difference
    for length in (4, 4 + steps):
        began = time.perf_counter()
        model.generate(prompts_RN, max_new_tokens=length, min_new_tokens=length, do_sample=False)
        took[length] = time.perf_counter() - began
    return (took[4 + steps] - took[4]) / steps


def decode_vllm(model: str, dtype: str, tokens: int, counts: list[int], steps: int) -> Seconds:
    """Median seconds of a step of vLLM's engine, by the number of sequences."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    import random

    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=tokens + steps + 16, max_num_batched_tokens=2048, disable_log_stats=True)
    engine, vocabulary = llm.llm_engine, llm.model_config.get_vocab_size()
    greedy = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
    seconds: dict[int, float] = {}
    for round_, count in enumerate([counts[0], *counts]):  # the first warms up
        draw = random.Random(round_)
        for number in range(count):
            ids = [draw.randrange(2, vocabulary) for _ in range(tokens)]
            engine.add_request(f"{round_}-{number}", {"prompt_token_ids": ids}, greedy)
        took: list[float] = []
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            if len(outputs) == count and all(len(output.outputs[0].token_ids) > 1 for output in outputs):
                took.append(time.perf_counter() - began)
        seconds[count] = statistics.median(took)
    return {"vllm": seconds}


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory or known name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=1000, help="before every sequence (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", action="store_true", help="vLLM instead")
    parser.add_argument("--ours-only", action="store_true", help="without transformers' generate")
    options = parser.parse_args()
    shape = (options.model, options.dtype, options.tokens, options.sequences, options.steps)
    seconds = decode_vllm(*shape) if options.vllm else decode_ours(*shape, options.threads, peers=not options.ours_only)
    for name, by_count in seconds.items():
        for count, step_s in by_count.items():
            print(f"{name:8} {count:3} sequences: {1000 * step_s:7.2f} ms a step, {count / step_s:7.1f} tokens/s")
    told = {name: {str(count): step_s for count, step_s in by_count.items()} for name, by_count in seconds.items()}
    print(json.dumps({"model": options.model, "dtype": options.dtype, "tokens": options.tokens, "step_s": told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
