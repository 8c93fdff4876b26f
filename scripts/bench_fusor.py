"""Time to first token of a blend against full prefill: at the shape the project states its speed for, or a model's.

    python scripts/bench_fusor.py                        # 6 x 512 chunk tokens + 32 question tokens, KV in RAM
    python scripts/bench_fusor.py --model smollm2-135m   # in the model's dtype
    python scripts/bench_fusor.py --chunks 12 --repeats 7
    python scripts/bench_fusor.py --ratios 0.05 0.14 --bandwidths 0.2 0.5 2   # KV from a disk of so many GB/s as well

Every round has a prompt of another length, as a server's prompts have: what is compiled for a length is not ready.
Definitions: full prefill is the Hugging Face model's own forward (sdpa, `logits_to_keep=1`) to the first logits; blend is
`Fusor.fuse` to the first logits, chunk KV in RAM. Medians over interleaved repeats after one warm-up each; `speedup` is
their ratio. `ideal` is full prefill's multiply-adds over the blend's own (`cacheblend.eval.compute`): matrix products
and exact causal attention, nothing else. A disk is simulated: the loader's reads sleep until their bytes are due, and
then copy from RAM. `load` is the bytes over the bandwidth, and `recompute` the same blend with KV in RAM; a loading that
hides has a TTFT of the larger one. The last stdout line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.blend import DEFAULT_SELECTOR, FusionConfig, FusionResult, Fusor, Segment
from cacheblend.blend.widening import FIRST_RATIO
from cacheblend.eval.compute import ModelCompute, compute_share
from cacheblend.loader import LayerLoader
from cacheblend.store import ChunkKV, LayerPair
from cacheblend.store.chunk import KVPart
from cacheblend.store.codecs import CODECS, LayerShape

SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "max_position_embeddings": 32768,
}


WARM_UP = 3  # rounds in which the numbers of rows that recur are met


class Disk:
    """A disk of one bandwidth, whose reads come one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def read(self, count: int) -> None:
        """Sleep until this read and all before it are done."""
        with self._lock:
            self._free_at = due = max(self._free_at, time.perf_counter()) + count / self.bytes_per_s
        time.sleep(max(0.0, due - time.perf_counter()))


class KVOnDisk(KVPart):
    """A chunk's KV as a codec stores it, read no faster than a disk reads it."""

    def __init__(self, kv: ChunkKV, disk: Disk, codec: str) -> None:
        super().__init__(kv, 0, kv.token_ids)
        self.tier, self.in_memory, self._disk, self._codec = "nvme", False, disk, CODECS[codec]
        self._shapes = [LayerShape(*k_HTD.shape, kv.dtype) for k_HTD, _ in kv.layers]
        self._encoded = []
        for shape, pair in zip(self._shapes, kv.layers, strict=True):
            stored = self._codec.encoded_shape(shape)
            self._encoded.append(torch.empty((1, *stored.shape), dtype=stored.dtype))
            self._codec.encode([pair], self._encoded[-1])
        self.layer_bytes = lambda layer: self._encoded[layer].nbytes

    def read_layer(self, layer: int) -> LayerPair:
        self._disk.read(self.layer_bytes(layer))
        return self._codec.decode(self._encoded[layer][0], self._shapes[layer])


@cache
def put_on_disk(kv: ChunkKV, disk: Disk, codec: str) -> KVOnDisk:
    """A chunk's KV on a disk, encoded once."""
    return KVOnDisk(kv, disk, codec)


def make_fusor(seed: int = 0, dtype: torch.dtype = torch.float32) -> Fusor:
    """A random Llama of the stated shape."""
    torch.manual_seed(seed)
    return Fusor(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().requires_grad_(False).to(dtype), fingerprint="bench")


def make_prompts(fusor: Fusor, chunks: int, chunk_tokens: int, question_tokens: int, count: int) -> list[list[Segment]]:
    """Prompts of BOS, chunks with their KV precomputed and a question, which is a token longer in each."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(2, fusor.decoder.config.vocab_size, (count,), generator=generator).tolist()

    texts = [draw(chunk_tokens) for _ in range(chunks)]
    begin = [Segment([1]), *(Segment(text, fusor.precompute(text, (1,))) for text in texts)]
    return [[*begin, Segment(draw(question_tokens + number))] for number in range(count)]


def measure(calls: dict[str, Callable[[list[Segment]], FusionResult]], prompts: list[list[Segment]]) -> dict[str, list[float]]:
    """Seconds of every call, interleaved, a prompt a round; the first `WARM_UP` rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number, prompt in enumerate(prompts):
        for name, call in calls.items():
            started = time.perf_counter()
            call(prompt)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
        print(f"round {number + 1} of {len(prompts)}", file=sys.stderr)
    return seconds


def on_disk(prompt: list[Segment], disk: Disk, codec: str) -> list[Segment]:
    """The prompt with its chunks' KV on a disk."""
    return [
        replace(segment, kv=put_on_disk(segment.kv, disk, codec)) if isinstance(segment.kv, ChunkKV) else segment
        for segment in prompt
    ]


def load_and_fuse(prompt: list[Segment], fusor: Fusor, config: FusionConfig, disk: Disk, codec: str) -> FusionResult:
    """Blend with the loader, the chunks' KV on a disk."""
    with LayerLoader() as loader:
        return fusor.fuse(on_disk(prompt, disk, codec), config, loader)


def print_loading(load_s: dict[float, float], ratios: list[float], seconds: dict[str, list[float]]) -> list[dict[str, float]]:
    """Print how much of the loading hides, by bandwidth and ratio; returns the rows."""
    rows = []
    print("GB/s  ratio   load  recompute  TTFT (s)  TTFT over the larger")
    for gb_s, loaded_s in load_s.items():
        for ratio in ratios:
            alone_s = statistics.median(seconds[f"blend {ratio}"])
            ttft_s = statistics.median(seconds[f"{gb_s} GB/s, {ratio}"])
            over = ttft_s / max(loaded_s, alone_s)
            print(f"{gb_s:<5g} {ratio:<6g} {loaded_s:.3f}      {alone_s:.3f}     {ttft_s:.3f}  {over:.2f}")
            rows.append(
                {"gb_s": gb_s, "ratio": ratio, "load_s": loaded_s, "recompute_s": alone_s, "ttft_s": ttft_s, "over": over}
            )
    return rows


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, GGUF file or known name; left out, random weights of the stated shape")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the model's, or float32"
    )
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.15, 0.3])
    parser.add_argument("--bandwidths", type=float, nargs="*", default=[], help="of disks, in GB/s; left out, KV is in RAM")
    parser.add_argument("--codec", default="raw", choices=CODECS, help="of KV on a disk")
    parser.add_argument("--selector", default=DEFAULT_SELECTOR)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    if options.model:
        fusor = Fusor.from_pretrained(options.model, dtype=options.dtype)
    else:
        fusor = make_fusor(dtype=torch.bfloat16 if options.dtype == "bfloat16" else torch.float32)
    prompts = make_prompts(fusor, options.chunks, options.chunk_tokens, options.question_tokens, WARM_UP + options.repeats + 1)
    *prompts, counted = prompts
    tokens = sum(len(segment.token_ids) for segment in counted)

    def full(prompt: list[Segment]) -> FusionResult:
        return fusor.prefill([token for segment in prompt for token in segment.token_ids])

    calls: dict[str, Callable[[list[Segment]], FusionResult]] = {"full": full}
    configs = {str(ratio): FusionConfig(recompute_ratio=ratio, selector=options.selector) for ratio in options.ratios}
    if options.selector == DEFAULT_SELECTOR:  # a blend that may be widened and is not, and one that is
        for name, nats in (("settled", 1e9), ("widened", 1e-9)):
            configs[name] = FusionConfig(recompute_ratio=FIRST_RATIO, max_loss_nats=nats)
    for name, config in configs.items():
        calls[f"blend {name}"] = lambda prompt, config=config: fusor.fuse(prompt, config)
    disks = {gb_s: Disk(gb_s * 1e9) for gb_s in options.bandwidths}
    for gb_s, disk in disks.items():
        for ratio in options.ratios:
            config = configs[str(ratio)]
            calls[f"{gb_s} GB/s, {ratio}"] = partial(load_and_fuse, fusor=fusor, config=config, disk=disk, codec=options.codec)
    compute = ModelCompute.of(fusor.decoder)
    ideal = {name: 1 / compute_share(call(counted), compute) for name, call in calls.items() if "GB/s" not in name}
    seconds = measure(calls, prompts)
    full_s = statistics.median(seconds["full"])
    spread = f"min {min(seconds['full']):.3f}, max {max(seconds['full']):.3f}"
    print(f"full prefill of {tokens} tokens: {full_s:.3f} s ({spread})")
    summary: dict[str, Any] = {
        "tokens": tokens,
        "full_s": full_s,
        "threads": options.threads,
        "dtype": str(fusor.decoder.dtype),
        "blend": {},
    }
    for name in configs:
        runs = seconds[f"blend {name}"]
        blend_s = statistics.median(runs)
        print(
            f"blend at {name:<7} {blend_s:.3f} s (min {min(runs):.3f}, max {max(runs):.3f})  "
            f"{full_s / blend_s:.2f} x, ideal {ideal[f'blend {name}']:.2f} x"
        )
        summary["blend"][name] = {"blend_s": blend_s, "speedup": full_s / blend_s, "ideal": ideal[f"blend {name}"]}
    if disks:
        stored = on_disk(counted, next(iter(disks.values())), options.codec)
        layers = range(fusor.decoder.geometry.layers)
        stored_bytes = sum(one.kv.layer_bytes(layer) for one in stored if one.kv is not None for layer in layers)
        load_s = {gb_s: stored_bytes / disk.bytes_per_s for gb_s, disk in disks.items()}
        summary["loading"] = print_loading(load_s, options.ratios, seconds)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
