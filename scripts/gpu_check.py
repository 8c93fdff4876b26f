"""Checks and times the CUDA path on random weights of real models' shapes; the same steps run on a CPU with a tiny one.

    python scripts/gpu_check.py --out gpu.json                 # shapes of 8B and 32B, bfloat16, 4k, 16k and 64k tokens
    python scripts/gpu_check.py --device cpu --shapes tiny

For each prompt:
- logits at ratio 1.0 against the model's own forward; logits and every layer's K and V of a blend loaded from RAM and from
  NVMe against the same blend with KV in memory;
- TTFT (to the first logits, device synchronised, medians) of full prefill and of blends at each ratio from both tiers, the page
  cache dropped before each read from NVMe;
- the loader's bandwidth from RAM over that of plain pinned copies of the same bytes to the device (on a CPU: of plain copies);
- the share of a blend in which the device has nothing to run (on a CPU: in which the fusor waits for KV);
- the most memory that the device held, and after the first prompt of a shape decoding steps of 1 to 64 sequences.

A prompt for which the device's memory or the time is short is named as such. Exits with 1 where a check fails. stdout ends with
a table and one JSON object, which `--out` writes as well.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import MistralConfig, MistralForCausalLM

from cacheblend.blend import FusionConfig, FusionResult, Fusor, Prompt, Segment, SequenceKV
from cacheblend.blend.interfaces import GROWTH_TOKENS
from cacheblend.loader import LayerLoader, describe_device
from cacheblend.loader.profiler import drop_page_cache
from cacheblend.store import ChunkKey, ChunkKV, KVStore, StoreConfig

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "config": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072},
        "chunk_tokens": 512,
        "chunks": [8, 32, 127],
    },
    "32b": {
        "config": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 27648, "vocab_size": 152064, "max_position_embeddings": 131072},
        "chunk_tokens": 512,
        "chunks": [8, 32, 127],
    },
    "tiny": {
        "config": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 96, "vocab_size": 400, "max_position_embeddings": 1024},
        "chunk_tokens": 32,
        "chunks": [3, 6],
    },
}
RATIOS = (0.05, 0.15, 0.3)
DECODED = (1, 4, 16, 64)  # sequences in one step
DECODING_STEPS = 8
MEMORY_PART = 0.7  # of what is free may be decoded sequences' KV
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # of the largest logit


class Check:
    """A fusor of random weights, and a prompt's chunks in a store of each tier."""

    def __init__(self, fusor: Fusor, folder: Path, chunks: int, chunk_tokens: int) -> None:
        self.fusor, self.folder = fusor, folder
        generator = torch.Generator().manual_seed(chunks)
        vocabulary = fusor.decoder.config.vocab_size

        def draw(count: int) -> list[int]:
            return torch.randint(2, vocabulary, (count,), generator=generator).tolist()

        texts = [draw(chunk_tokens) for _ in range(chunks)]
        self.question = Segment(draw(min(32, chunk_tokens)))
        self.resident = [Segment(text, fusor.precompute(text, (1,))) for text in texts]
        self.keys = [ChunkKey.of(text, prefix_ids=(1,), model=fusor.fingerprint) for text in texts]
        with self.store("ram") as store:
            for key, segment in zip(self.keys, self.resident, strict=True):
                assert isinstance(segment.kv, ChunkKV)
                store.put(key, segment.kv)

    def store(self, tier: str) -> KVStore:
        """The store, with RAM for everything or for nothing."""
        return KVStore(StoreConfig(directory=self.folder / "kv", ram_budget_bytes=2**40 if tier == "ram" else 1))

    @property
    def token_ids(self) -> list[int]:
        """The whole prompt."""
        return [token for segment in (Segment([1]), *self.resident, self.question) for token in segment.token_ids]

    def blend(self, ratio: float, store: KVStore | None) -> FusionResult:
        """Blend the prompt with KV from a store, or with KV in memory."""
        config = FusionConfig(recompute_ratio=ratio)
        if store is None:
            return self.fusor.fuse([Segment([1]), *self.resident, self.question], config)
        with store.pin(self.keys) as placements, LayerLoader() as loader:
            segments = [Segment(placement.token_ids, placement) for placement in placements if placement is not None]
            return self.fusor.fuse([Segment([1]), *segments, self.question], config, loader)

    def load_s(self, store: KVStore) -> float:
        """Seconds to load every layer of all chunks, nothing computed beside."""
        with store.pin(self.keys) as placements, LayerLoader() as loader:
            segments = [Segment(placement.token_ids, placement) for placement in placements if placement is not None]
            started = time.perf_counter()
            loader.start(Prompt.of([*segments, self.question]), self.fusor.decoder.geometry, reuse_layer_0=True)
            for layer in range(self.fusor.decoder.geometry.layers):
                loader.synchronize(layer)
            synchronize(self.fusor.decoder.device)
            return time.perf_counter() - started

    def drop_cache(self) -> None:
        """Have the system forget the store's files."""
        drop_page_cache(path for path in (self.folder / "kv" / "entries").rglob("*") if path.is_file())


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(
    call: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], None] = lambda: None
) -> float:
    """Median seconds after one warm-up, the device synchronised."""
    seconds = []
    for repeat in range(repeats + 1):
        before()
        started = time.perf_counter()
        call()
        synchronize(device)
        if repeat:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def off_by(one: FusionResult, other: FusionResult) -> float:
    """Largest difference of logits, keys and values, over the largest logit."""
    off = float((one.logits - other.logits).abs().max())
    mine: Any = one.cache.layers
    theirs: Any = other.cache.layers
    for a, b in zip(mine, theirs, strict=True):
        off = max(off, float((a.keys - b.keys).abs().max()), float((a.values - b.values).abs().max()))
    return off / max(1e-9, float(other.logits.abs().max()))


def copy_rate(check: Check, repeats: int) -> float:
    """Bytes per second of plain copies to the device, from pinned memory where that is a GPU: the bus's ceiling."""
    geometry = check.fusor.decoder.geometry
    tokens = len(check.token_ids)
    pinned = torch.empty(geometry.layer_bytes(tokens), dtype=torch.uint8, pin_memory=geometry.device.type == "cuda")

    def copy() -> None:
        for _ in range(geometry.layers):
            torch.empty_like(pinned, device=geometry.device).copy_(pinned, non_blocking=True)

    return geometry.layers * len(pinned) / median_s(copy, geometry.device, repeats)


def idle_share(check: Check, ratio: float, store: KVStore) -> float:
    """Share of a blend in which the device runs nothing; on a CPU, in which the fusor waits for KV."""
    device = check.fusor.decoder.device
    if device.type != "cuda":
        started = time.perf_counter()
        return check.blend(ratio, store).wait_s / (time.perf_counter() - started)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        check.blend(ratio, store)
        synchronize(device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Memcpy")
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / max(1e-9, reached - spans[0][0])


def decode_s(check: Check, fused: FusionResult) -> dict[int, float]:
    """Median seconds of a step by the number of sequences, each with a copy of the prompt; as many as there is room for."""
    decoder, device = check.fusor.decoder, check.fusor.decoder.device
    one_bytes = decoder.geometry.layers * decoder.geometry.layer_bytes(len(fused.token_ids) + GROWTH_TOKENS)
    seconds: dict[int, float] = {}
    for count in DECODED:
        if device.type == "cuda" and count * one_bytes > MEMORY_PART * torch.cuda.mem_get_info(device)[0]:
            break
        sequences = [SequenceKV(fused, decoder.windows) for _ in range(count)]
        tokens = [int(fused.logits.argmax())] * count
        step = lambda tokens=tokens, sequences=sequences: decoder.decode(tokens, sequences).argmax(dim=-1).tolist()  # noqa: E731 - bound to this turn's values
        seconds[count] = median_s(step, device, DECODING_STEPS)
    return seconds


def run(check: Check, ratios: Sequence[float], repeats: int) -> dict[str, Any]:
    """All figures of one prompt."""
    device, allowed = check.fusor.decoder.device, ALLOWED[check.fusor.decoder.dtype]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole = check.fusor.prefill(check.token_ids)
    everything = check.blend(1.0, None)
    at_one = float((everything.logits - whole.logits).abs().max() / whole.logits.abs().max())
    row: dict[str, Any] = {"tokens": len(check.token_ids), "ratio_1_off": at_one, "ok": at_one <= allowed}
    row["full_s"] = median_s(lambda: check.fusor.prefill(check.token_ids), device, repeats)
    total = check.fusor.decoder.geometry.layers * check.fusor.decoder.geometry.layer_bytes(1)
    total *= sum(len(segment.token_ids) for segment in check.resident)
    for tier in ("ram", "nvme"):
        with check.store(tier) as store:
            if tier == "ram":
                for key in check.keys:
                    store.get(key)
            before = check.drop_cache if tier == "nvme" else lambda: None
            loaded_off = off_by(check.blend(0.15, store), check.blend(0.15, None))
            row[f"{tier}_off"], row["ok"] = loaded_off, row["ok"] and loaded_off <= allowed
            for ratio in ratios:
                call = lambda ratio=ratio, store=store: check.blend(ratio, store)  # noqa: E731 - bound to this turn's values
                blend_s = median_s(call, device, repeats, before)
                row[f"{tier}_{ratio}_s"], row[f"{tier}_{ratio}_speedup"] = blend_s, row["full_s"] / blend_s
            row[f"{tier}_bytes_per_s"] = total / median_s(lambda store=store: check.load_s(store), device, repeats, before)
            before()
            row[f"{tier}_idle_share"] = idle_share(check, 0.15, store)
    row["copy_bytes_per_s"] = copy_rate(check, repeats)
    row["ram_over_copy"] = row["ram_bytes_per_s"] / row["copy_bytes_per_s"]
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row


def check_shape(name: str, device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a prompt of one shape."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = MistralForCausalLM(MistralConfig(**shape["config"], sliding_window=None)).eval().requires_grad_(False)
    except torch.OutOfMemoryError:
        yield {"shape": name, "ok": True, "left_out": "the weights do not fit the device's memory"}
        return
    finally:
        torch.set_default_dtype(torch.float32)
    fusor = Fusor(model, fingerprint=f"gpu-check-{name}")
    for chunks in shape["chunks"]:
        row: dict[str, Any] = {"shape": name, "tokens": chunks * shape["chunk_tokens"], "ok": True}
        if time.perf_counter() > options.ends:
            yield row | {"left_out": f"not begun within {options.budget_s:g} s"}
            continue
        try:
            with tempfile.TemporaryDirectory(dir=options.directory, prefix="gpu-check-") as scratch:
                check = Check(fusor, Path(scratch), chunks, shape["chunk_tokens"])
                row |= run(check, RATIOS, options.repeats)
                if chunks == shape["chunks"][0]:
                    row["decode_s"] = decode_s(check, check.blend(0.15, None))
        except torch.OutOfMemoryError:
            row["left_out"] = "the device's memory does not hold it"
        yield row


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table: full prefill, blends from both tiers with their speed-up, memory, decoding."""
    yield (
        "| shape | tokens | full, s | "
        + " | ".join(f"{tier} {r}" for tier in ("RAM", "disk") for r in RATIOS)
        + " | GB | ms a step |"
    )
    yield "|---" * (5 + 2 * len(RATIOS)) + "|"
    for row in rows:
        if "full_s" not in row:
            yield f"| {row['shape']} | {row.get('tokens', '')} | {row['left_out']} |"
            continue
        blends = (
            f"{row[f'{tier}_{r}_s']:.3f} ({row[f'{tier}_{r}_speedup']:.1f} x)" for tier in ("ram", "nvme") for r in RATIOS
        )
        steps = ", ".join(f"{count}: {1000 * step_s:.1f}" for count, step_s in row.get("decode_s", {}).items())
        memory = f"{row.get('peak_bytes', 0) / 1e9:.1f}"
        yield f"| {row['shape']} | {row['tokens']} | {row['full_s']:.3f} | " + " | ".join(blends) + f" | {memory} | {steps} |"


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["8b", "32b"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="left out: bfloat16 on a GPU, else float32")
    parser.add_argument("--directory", type=Path, default=Path("."), help="a folder on the disk to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=420.0, help="no prompt is begun after so long (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the JSON object")
    options = parser.parse_args()
    options.ends = time.perf_counter() + options.budget_s
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; run with --device cpu --shapes tiny to go through the same steps")
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        for row in check_shape(name, device, dtype, options):
            rows.append(row)
            print(json.dumps(row, indent=1), file=sys.stderr, flush=True)
        gc.collect()  # the model's modules point at each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ok = all(row["ok"] for row in rows)
    summary = {"device": describe_device(device), "dtype": str(dtype), "torch": torch.__version__, "ok": ok, "prompts": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(table(rows)))
    print(json.dumps(summary))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
