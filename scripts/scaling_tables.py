"""Tables of docs/scaling.md: KV bytes, chunks a node holds, network against recompute, and what a million requests cost.

    python scripts/scaling_tables.py
    python scripts/scaling_tables.py --tokens 6144 --gpu-price 2.5 --codec int8

Nothing is measured here. A model is known by its public configuration, a GPU by its data sheet, and a tier by a bandwidth and a
latency; all of them stand in this file with their source. What a prefill and a blend take follows from the loading controller's
own estimators (`compare_devices`), over a profile whose samples are arithmetic: multiply-adds over the GPUs' peak times
`--utilisation`, and the weights' bytes over their memory's bandwidth.

Bandwidths of the break-even table: below `stops paying` the blend is later than full prefill, above `hidden` loading adds
nothing to computing. `uses` is how often a month a stored chunk must be used so that the GPU time it saves pays its storage.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend.loader import LoaderConfig, Profile
from cacheblend.loader.profile import LayerSample, PrefillSample
from cacheblend.loader.storage_plan import DeviceChoice, StorageDevice, compare_devices
from cacheblend.store.codecs import CODECS, LayerShape

GPU_FLOPS = 989e12  # H100 SXM, dense bfloat16: NVIDIA's data sheet
GPU_BYTES_PER_S = 3.35e12  # of its HBM3, same sheet
NODE_RAM_BYTES, NODE_NVME_BYTES = 1e12, 15e12
CHUNK_TOKENS = 512
QUESTION_TOKENS = 32
# Of a value, scales included, in chunks of a model with 8 KV heads of 128.
_SHAPE = LayerShape(8, CHUNK_TOKENS, 128, torch.bfloat16)
CODEC_BYTES = {
    name: CODECS[name].encoded_shape(_SHAPE).nbytes / (2 * 8 * CHUNK_TOKENS * 128) for name in ("raw", "int8", "int4")
}


@dataclass(frozen=True)
class Model:
    """A model by its public configuration.

    Args:
        name: of it.
        layers: `num_hidden_layers`.
        layer_weights: that one token runs through in a layer.
        stored_weights: of a layer, all experts.
        attention: multiply-adds of a row with one key, all heads.
        kv_values: of one token in one layer.
        gpus: that run it here.
        source: where the numbers stand.
    """

    name: str
    layers: int
    layer_weights: float
    stored_weights: float
    attention: float
    kv_values: int
    gpus: int
    source: str

    def token_bytes(self, codec: str) -> float:
        """Bytes of a token's KV in all layers."""
        return self.layers * self.kv_values * CODEC_BYTES[codec]


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, gpus: int, source: str) -> Model:
    head = hidden // heads
    weights = 2 * hidden * hidden + 2 * hidden * kv_heads * head + 3 * hidden * intermediate
    return Model(name, layers, weights, weights, 2 * heads * head, 2 * kv_heads * head, gpus, source)


MODELS = (
    _llama("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 1, "meta-llama/Llama-3.1-8B config.json"),
    _llama("Llama-3.1-70B (GQA)", 80, 8192, 64, 8, 28672, 4, "meta-llama/Llama-3.1-70B config.json"),
    # MLA keeps a latent of kv_lora_rank = 512 and a rotated key of 64 for all heads together; heads are 128, of 192 and 128.
    Model(
        "DeepSeek-V3 (MLA)", 61, 37e9 / 61, 671e9 / 61, 128 * (192 + 128), 512 + 64, 16, "deepseek-ai/DeepSeek-V3 config.json"
    ),
)
MAX_BYTES_PER_S = 1e13
IN_FLIGHT = 64  # reads at once, which share the latency of one: see `TierSpeed.read_s`


def _tier(name: str, gb_per_s: float, latency_s: float, price: float) -> StorageDevice:
    return StorageDevice(device=name, read_bytes_per_s=gb_per_s * 1e9, read_s=latency_s / IN_FLIGHT, price_per_gb_month=price)


# Orders of magnitude, as in loader/devices.csv, with its prices; a network at four fifths of its line rate.
TIERS = (
    _tier("RAM", 20, 0, 4.0),
    _tier("local NVMe", 6, 1e-4, 0.3),
    _tier("Redis, 100 Gb/s", 10, 2e-4, 4.0),
    _tier("Redis, 25 Gb/s", 2.5, 2e-4, 4.0),
    _tier("Redis, 10 Gb/s", 1, 2e-4, 4.0),
    _tier("object store, 2 GB/s", 2, 2e-2, 0.023),
    _tier("object store, 100 MB/s", 0.1, 5e-2, 0.023),
)


@dataclass(frozen=True)
class Request:
    """Sizes of a request, and how well the GPUs are used.

    Args:
        tokens: that are reused.
        utilisation: of the GPUs' peak in a prefill.
        codec: of the stored KV.
    """

    tokens: int
    utilisation: float
    codec: str

    def profile(self, model: Model) -> Profile:
        """A profile of arithmetic in place of measurements."""
        flops, memory = model.gpus * GPU_FLOPS * self.utilisation, model.gpus * GPU_BYTES_PER_S
        weights_s = 2 * model.stored_weights / memory  # 16 bits each

        def seconds(rows: int, tokens: int, projected: int = 0) -> float:
            per_row = model.layer_weights + model.attention * tokens / 2  # a row sees half of the keys, in the mean
            projection = projected * 0.1 * model.layer_weights  # K and V alone, at most
            return max(weights_s, 2 * (rows * per_row + projection) / flops)

        lengths = [self.tokens // 4, self.tokens // 2, self.tokens, 2 * self.tokens]
        later = [
            LayerSample(layer=1, tokens=tokens, rows=rows, projected=projected, seconds=seconds(rows, tokens, projected))
            for tokens in lengths
            for rows in sorted({1, 32, tokens // 16, tokens // 8, tokens // 4, tokens // 2, tokens})
            for projected in (0, rows)
        ]
        return Profile(
            model=model.name,
            device="arithmetic",
            torch_version="none",
            layers=model.layers,
            layer_token_bytes=math.ceil(model.kv_values * CODEC_BYTES[self.codec]),
            prefill=tuple(PrefillSample(tokens=n, seconds=model.layers * seconds(n, n)) for n in lengths),
            blend=(*(LayerSample(layer=0, tokens=n, rows=n, projected=0, seconds=seconds(n, n)) for n in lengths), *later),
            logits_s=0.0,
            tiers={"ram": TIERS[0].speed, "nvme": TIERS[1].speed},
        )

    def on(self, model: Model, tiers: Sequence[StorageDevice] = TIERS) -> dict[str, DeviceChoice]:
        """What the request takes with its KV in each tier, by the tier's name."""
        found = compare_devices(
            self.profile(model), tiers, tokens=self.tokens, chunk_tokens=CHUNK_TOKENS, question_tokens=QUESTION_TOKENS
        )
        return {choice.device.device: choice for choice in found}

    def bandwidth(self, model: Model, *, hides: bool) -> float | None:
        """The lowest bytes a second at which loading is hidden, or at which the blend is no later than full prefill.

        None where it is later at any: a prompt so short that each pass costs the reading of the weights.
        """
        low, high = 1e5, MAX_BYTES_PER_S
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            tier = StorageDevice(device="", read_bytes_per_s=middle, read_s=0, price_per_gb_month=0)
            (choice,) = self.on(model, [tier]).values()
            enough = choice.adds_no_delay if hides else choice.prefill_s <= choice.full_s
            low, high = (low, middle) if enough else (middle, high)
        return high if high < MAX_BYTES_PER_S else None


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows as Markdown."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Compute and print; gives the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=6 * CHUNK_TOKENS, help="reused in a request")
    parser.add_argument("--utilisation", type=float, default=0.5, help="of the GPUs' peak in a prefill")
    parser.add_argument("--gpu-price", type=float, default=3.0, help="of a GPU hour, in the currency of the tiers' prices")
    parser.add_argument("--hit-rate", type=float, default=0.9, help="of lookups, for the price of a million requests")
    parser.add_argument("--codec", choices=sorted(CODEC_BYTES), default="raw")
    options = parser.parse_args(arguments)
    request = Request(options.tokens, options.utilisation, options.codec)
    figures: dict[str, Any] = {"ratio": LoaderConfig().quality_ratio, **vars(options), "models": {}}

    print("1. Bytes a token, and chunks of 512 tokens on a node with 1 TB of RAM and 15 TB of NVMe")
    rows = []
    for model in MODELS:
        size = {codec: model.token_bytes(codec) for codec in CODEC_BYTES}
        chunk = size[options.codec] * CHUNK_TOKENS
        held = [f"{room / chunk:,.0f}" for room in (NODE_RAM_BYTES, NODE_NVME_BYTES)]
        rows.append([model.name, *(f"{one / 1e3:.1f} kB" for one in size.values()), f"{chunk / 1e6:.1f} MB", *held])
        figures["models"][model.name] = {"token_bytes": size, "chunk_bytes": chunk, "source": model.source}
    print_table(["model", *CODEC_BYTES, f"a chunk ({options.codec})", "in RAM", "on NVMe"], rows)

    print(f"\n2. Seconds to the first token of {options.tokens:,} reused tokens and a question of {QUESTION_TOKENS}")
    rows = []
    for model in MODELS:
        found = request.on(model)
        full_s = next(iter(found.values())).full_s
        cells = [f"{found[tier.device].prefill_s:.3f} ({full_s / found[tier.device].prefill_s:.1f} x)" for tier in TIERS]
        rows.append([f"{model.name}, {model.gpus} GPU", f"{full_s:.3f}", *cells])
        figures["models"][model.name] |= {
            "full_s": full_s,
            "prefill_s": {name: choice.prefill_s for name, choice in found.items()},
        }
    print_table(["model", "full prefill", *(tier.device for tier in TIERS)], rows)

    print("\n3. Bandwidth at which loading is hidden, and below which a tier stops paying in time")
    rows = []
    for model in MODELS:
        hidden, pays = request.bandwidth(model, hides=True), request.bandwidth(model, hides=False)
        assert hidden is not None, "no device hides loading"
        rows.append([model.name, f"{hidden / 1e9:.1f} GB/s", "at any" if pays is None else f"{pays / 1e9:.2f} GB/s"])
        figures["models"][model.name] |= {"hidden_bytes_per_s": hidden, "pays_from_bytes_per_s": pays}
    print_table(["model", "hidden", "stops paying"], rows)

    print(f"\n4. GPU price of a million requests at a hit rate of {options.hit_rate:.0%}, and uses a month that pay a chunk")
    rows = []
    for model in MODELS:
        found = request.on(model)
        ram = found["RAM"]
        second = model.gpus * options.gpu_price / 3600
        blend_s = ram.prefill_s - ram.delay_s
        full = 1e6 * ram.full_s * second
        # What is missed is computed in the prompt, and once more by itself, to be stored.
        blend = 1e6 * (options.hit_rate * blend_s + (1 - options.hit_rate) * 2 * ram.full_s) * second
        saved = (ram.full_s - blend_s) * second / (options.tokens / CHUNK_TOKENS)
        chunk_gb = model.token_bytes(options.codec) * CHUNK_TOKENS / 1e9
        uses = {tier.device: chunk_gb * tier.price_per_gb_month / saved if saved > 0 else None for tier in TIERS}
        cells = [uses[name] for name in ("RAM", "local NVMe", "object store, 2 GB/s")]
        shown = ["never" if one is None else f"{one:,.0f}" for one in cells]
        rows.append([model.name, f"{full:,.0f}", f"{blend:,.0f}", *shown])
        figures["models"][model.name] |= {"full_price": full, "blend_price": blend, "uses_a_month": uses}
    print_table(["model", "full prefill", "blend", "uses, RAM", "uses, NVMe", "uses, object store"], rows)
    print(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
