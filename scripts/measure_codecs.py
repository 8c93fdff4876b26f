"""Cost and gain of each codec: bytes, error of keys and values, first logits and answers after blending.

    python scripts/measure_codecs.py                  # a random Llama, 4 chunks of 128 tokens
    python scripts/measure_codecs.py --model smollm2-135m --data DIR --cases 20   # a pretrained model over SQuAD's passages

The random model's q, k, v and o weights are scaled up, so that attention is sharp and an error shows. Figures, by codec:
`size`: stored bytes over those of raw float32. `size_16_bit`: the same over a model of 16 bits. `key_error`, `value_error`:
norm of the error over the norm of what was stored, over all chunks and layers. `logits`, by recompute ratio: norm of the change
of the first logits against the same blend from raw KV, over the norm of what blending from raw KV changes against full prefill
at ratio 0: 1 would be as much as reuse itself costs. `same_first_token`: whether the greedy first token is that of raw KV.
`losses` stand in the place of all that for a pretrained model: by codec and recompute ratio the mean KL of the first token, and
the right answer's negative log-likelihood above full recompute's, in nats.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.blend import FusionConfig, Fusor, Segment
from cacheblend.blend.selection import DEFAULT_RATIO
from cacheblend.eval.data import FileSource, Preset
from cacheblend.eval.data.source import prompt_renderer
from cacheblend.eval.methods import EverythingCached, ResidentRequest, StoredContexts
from cacheblend.eval.metrics import answer_nll_nats
from cacheblend.service.serving.quality_guard import first_token_kl_nats
from cacheblend.store import ChunkKV
from cacheblend.store.codecs import CODECS, LayerShape

RATIOS = (0.0, 0.15, 0.5)
VOCABULARY = 2048
SHARPER = 4.0


def make_fusor(seed: int) -> Fusor:
    """A random Llama whose attention is sharp."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
            parameter.mul_(SHARPER)
    return Fusor(model, fingerprint="random")


def stored(kv: ChunkKV, codec: str) -> tuple[ChunkKV, int]:
    """A chunk's KV after it was stored, and the bytes that it took."""
    layers, size = [], 0
    for k_HTD, v_HTD in kv.layers:
        layer = LayerShape(*k_HTD.shape, k_HTD.dtype)
        dtype, shape = CODECS[codec].encoded_shape(layer)
        encoded = torch.empty((1, *shape), dtype=dtype)
        CODECS[codec].encode([(k_HTD, v_HTD)], encoded)
        layers.append(CODECS[codec].decode(encoded[0], layer))
        size += encoded.nbytes
    return dataclasses.replace(kv, layers=layers), size


def after_storing(segments: Sequence[Segment], codec: str) -> list[Segment]:
    """A prompt's segments with their chunks' KV as a codec gives it back."""
    return [
        dataclasses.replace(one, kv=stored(one.kv, codec)[0]) if isinstance(one.kv, ChunkKV) and not one.exact else one
        for one in segments
    ]


def relative_error(ours: list[ChunkKV], raw: list[ChunkKV], part: int) -> float:
    """Norm of the error of keys (0) or values (1) over their norm."""
    pairs = [(a[part], b[part]) for kv, own in zip(ours, raw, strict=True) for a, b in zip(kv.layers, own.layers, strict=True)]
    error = sum(float((one - other).square().sum()) for one, other in pairs)
    return (error / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def losses(model: str, data: str, cases: int) -> dict[str, dict[float, dict[str, float]]]:
    """A pretrained model's losses against full recompute over passages of SQuAD, by codec and recompute ratio."""
    fusor = Fusor.from_pretrained(model, "cpu", "auto")
    preset = Preset(chunking="passage", top_k=6, prompt="few-shot")
    source = FileSource(name="squad_shared", data=data, preset=preset, cases=cases)
    renderer = prompt_renderer(fusor.tokenizer, source.wording)
    found: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for place, request in enumerate(source.requests(fusor.tokenizer, None), start=1):
        gold_ids = renderer.answer_ids(request.example.answers[0])
        full = fusor.prefill(request.prompt.token_ids)
        full_nll = answer_nll_nats(fusor, full, gold_ids)
        cached = EverythingCached().cached(request.prompt.chunks)
        raw = ResidentRequest(fusor, request, StoredContexts(fusor, renderer.prefix), *cached).blend_segments()
        for codec in CODECS:
            for ratio in (0.0, DEFAULT_RATIO):
                fused = fusor.fuse(after_storing(raw, codec), FusionConfig(recompute_ratio=ratio))
                loss = first_token_kl_nats(full.logits, fused.logits), answer_nll_nats(fusor, fused, gold_ids) - full_nll
                found[codec, ratio].append(loss)
        print(f"losses: {place} of {cases} cases", end="\r", file=sys.stderr)
    means: dict[str, dict[float, dict[str, float]]] = defaultdict(dict)
    for (codec, ratio), pairs in found.items():
        kl, nll = (round(statistics.fmean(column), 4) for column in zip(*pairs, strict=True))
        means[codec][ratio] = {"first_token_kl_nats": kl, "gold_nll_over_full_nats": nll}
        print(f"{codec} at {ratio}: KL {kl:.4f}, NLL over full {nll:+.3f}", file=sys.stderr)
    return means


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--cases", type=int, default=40, help="of SQuAD, for a pretrained model")
    parser.add_argument("--model", help="a pretrained one, and nothing but its losses; needs --data")
    parser.add_argument("--data", help="folder that has squad_shared's file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.model:
        if not options.data:
            parser.error("--model needs --data")
        found = losses(options.model, options.data, options.cases)
        print(json.dumps({"model": Path(options.model).name, "cases": options.cases, "losses": found}))
        return
    fusor = make_fusor(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    sizes = [options.chunk_tokens] * options.chunks + [24]
    *texts, question = (torch.randint(2, VOCABULARY, (size,), generator=generator).tolist() for size in sizes)
    raw = [fusor.precompute(text, (1,)) for text in texts]

    def logits(chunks: list[ChunkKV], ratio: float) -> torch.Tensor:
        reused = [Segment(text, kv) for text, kv in zip(texts, chunks, strict=True)]
        return fusor.fuse([Segment([1]), *reused, Segment(question)], FusionConfig(recompute_ratio=ratio)).logits

    from_raw = {ratio: logits(raw, ratio) for ratio in RATIOS}
    reuse = float((from_raw[0.0] - fusor.prefill([1, *(token for text in (*texts, question) for token in text)]).logits).norm())
    figures: dict[str, dict[str, object]] = {}
    for codec in CODECS:
        chunks, sizes = zip(*(stored(kv, codec) for kv in raw), strict=True)
        values = sum(kv.nbytes for kv in raw) // 4
        blended = {ratio: logits(list(chunks), ratio) for ratio in RATIOS}
        figures[codec] = {
            "size": round(sum(sizes) / (4 * values), 3),
            "size_16_bit": round((2 if codec == "raw" else sum(sizes) / values) / 2, 3),
            "key_error": round(relative_error(list(chunks), raw, 0), 5),
            "value_error": round(relative_error(list(chunks), raw, 1), 5),
            "logits": {ratio: round(float((blended[ratio] - from_raw[ratio]).norm()) / reuse, 4) for ratio in RATIOS},
            "same_first_token": {ratio: bool(blended[ratio].argmax() == from_raw[ratio].argmax()) for ratio in RATIOS},
        }
        print(f"{codec}: {figures[codec]}", file=sys.stderr)
    print(json.dumps({"chunks": options.chunks, "chunk_tokens": options.chunk_tokens, "codecs": figures}))


if __name__ == "__main__":
    main()
