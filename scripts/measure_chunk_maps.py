"""Blending a hybrid, tried: a chunk's gated delta rule as an affine map of the state, on a tiny random Qwen3-Next (ADR 29).

Shapes: H heads, T tokens, D head size of keys, E of values.

python scripts/measure_chunk_maps.py
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import transformers.models.qwen3_next.modeling_qwen3_next as qwen3_next
from model_families import tiny_model
from torch.nn.functional import kl_div, normalize
from transformers import Qwen3NextConfig

from cacheblend.blend import Fusor
from cacheblend.blend.hybrid import HybridDecoder, HybridSequence

HEAD, CHUNK, QUESTION = 40, 120, 40
SLOW_DECAY = -4.0  # of the logarithm of a head's decay: a random model forgets a chunk within some tokens
Map = tuple[torch.Tensor, torch.Tensor]
Rule = tuple[torch.Tensor, ...]  # keys (T, H, D), values (T, H, E), log decays and update rates (T, H) of a layer


def chunk_map(rule: Rule, tokens: slice) -> Map:
    """A (H, D, D) and B (H, D, E), with which S becomes A S + B over these tokens (float64)."""
    key, value, decay, rate = (x[tokens].double() for x in rule)
    key = normalize(key.repeat_interleave(value.shape[1] // key.shape[1], dim=1), dim=-1)
    a_HDD = torch.eye(key.shape[-1], dtype=torch.float64).repeat(key.shape[1], 1, 1)
    b_HDE = torch.zeros(*key.shape[1:], value.shape[-1], dtype=torch.float64)
    for k_HD, v_HE, g_H, r_H in zip(key, value, decay, rate, strict=True):
        step_HDD = torch.eye(key.shape[-1]) - r_H[:, None, None] * k_HD[:, :, None] * k_HD[:, None, :]
        step_HDD = g_H.exp()[:, None, None] * step_HDD
        a_HDD, b_HDE = step_HDD @ a_HDD, step_HDD @ b_HDE + r_H[:, None, None] * k_HD[:, :, None] * v_HE[:, None, :]
    return a_HDD, b_HDE


def rules(decoder: HybridDecoder, token_ids: Sequence[int]) -> tuple[list[Rule], HybridSequence]:
    """What each linear layer's rule is given for these tokens, and the sequence after them."""
    seen, own = list[Rule](), qwen3_next.torch_chunk_gated_delta_rule

    def noting(query: Any, key: Any, value: Any, *, g: Any, beta: Any, **kw: Any) -> Any:
        seen.append((key[0], value[0], g[0], beta[0]))
        return own(query, key, value, g=g, beta=beta, **kw)

    sequence = decoder.resume(None)
    qwen3_next.torch_chunk_gated_delta_rule = noting
    try:
        decoder.extend(sequence, token_ids)
    finally:
        qwen3_next.torch_chunk_gated_delta_rule = own
    return seen, sequence


def linear_layers(sequence: HybridSequence) -> list[Any]:
    """The layers of a sequence's cache that hold a state."""
    return [layer for layer in sequence.cache.layers if hasattr(layer, "recurrent_states")]


def measure(seed: int) -> dict[str, Any]:
    """A random prompt: head, two chunks that were each computed after the head alone, question."""
    model = tiny_model("qwen3_next")
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(SLOW_DECAY)
    decoder = Fusor(model).decoder
    assert isinstance(decoder, HybridDecoder)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (HEAD + 2 * CHUNK + QUESTION,), generator=generator).tolist()
    head, question, chunk = ids[:HEAD], ids[HEAD + 2 * CHUNK :], slice(HEAD, HEAD + CHUNK)
    (first, _), (second, after_second) = (rules(decoder, head + ids[at : at + CHUNK]) for at in (HEAD, HEAD + CHUNK))
    full = rules(decoder, head + ids[HEAD : HEAD + 2 * CHUNK])[1]
    errors, composed = list[float](), deepcopy(full)
    # The attention layers' KV is full prefill's, so that all difference is the states'.
    for at, layer in enumerate(linear_layers(composed)):
        state_HDE = chunk_map(first[at], slice(HEAD))[1]
        for rule in (first[at], second[at]):
            a_HDD, b_HDE = chunk_map(rule, chunk)
            state_HDE = a_HDD @ state_HDE + b_HDE
        full_HDE = layer.recurrent_states[0][0].double()
        errors.append(float((state_HDE - full_HDE).square().sum() / full_HDE.square().sum()))
        layer.recurrent_states[0][0].copy_(state_HDE)
        layer.conv_states[0].copy_(linear_layers(after_second)[at].conv_states[0])
    empty = deepcopy(full)
    for layer in linear_layers(empty):
        layer.recurrent_states[0].zero_()
    want = torch.log_softmax(decoder.extend(full, question).double(), dim=-1)
    kl: Callable[[HybridSequence], float] = lambda one: float(  # noqa: E731
        kl_div(torch.log_softmax(decoder.extend(one, question).double(), -1), want, reduction="sum", log_target=True)
    )
    return {"seed": seed, "relative_state_errors": errors, "kl_nats": kl(composed), "kl_nats_without_states": kl(empty)}


def sizes() -> dict[str, float]:
    """Bytes for Qwen3-Next 80B, by its config's defaults: of a state and a map (float32), of a token's KV (bfloat16)."""
    config = Qwen3NextConfig()
    types = config.layer_types or []
    layers = types.count("linear_attention")
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    attention = len(types) - layers
    return {
        "state_bytes": 4 * layers * heads * key * value,
        "map_bytes": 4 * layers * heads * key * (key + value),
        "kv_bytes_a_token": 2 * 2 * attention * config.num_key_value_heads * config.head_dim,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps({"sizes": sizes(), "models": [measure(seed) for seed in range(3)]}))
