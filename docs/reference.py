"""The method in plain PyTorch over a Llama, for readers who want to understand CacheBlend or to port it.

`blend` recomputes the tokens of `Fusor.fuse` and returns its logits and KV, without its speed, model families and loading. A
test compares the two. Read `blend` first: its numbered steps are the paper's §4.

Shapes: N tokens of the prompt, S rows that run through a layer, R reusable tokens, L layers, H KV heads, Q query heads, D head
size, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch

from cacheblend.blend.selectors import Schedule

Tensor = torch.Tensor
KV = list[tuple[Tensor, Tensor]]  # keys and values (H, T, D) of each layer
MAX_QUESTION_TOKENS, MAX_START_TOKENS, BRIDGE_WEIGHT = 64, 256, 2
SCHEDULES = {"question": Schedule(0.9, first_layer_multiple=1), "deviation": Schedule(0.3)}


@torch.no_grad()
def precompute(model: Any, prefix_ids: Sequence[int], chunk_ids: Sequence[int]) -> KV:
    """A chunk's KV, computed after a prefix: keys before RoPE, so that the chunk can stand anywhere."""
    ids_N = torch.tensor([*prefix_ids, *chunk_ids])
    everywhere_N = torch.arange(len(ids_N))
    hidden_NM = model.model.embed_tokens(ids_N)
    chunk_kv: KV = []
    for layer in model.model.layers:
        q_QND, k_HND, v_HND = _project(layer, hidden_NM)
        chunk_kv.append((k_HND[:, len(prefix_ids) :], v_HND[:, len(prefix_ids) :]))
        causal_NN = everywhere_N <= everywhere_N[:, None]
        q_QND, k_HND = (_rotate(model, x, everywhere_N) for x in (q_QND, k_HND))
        out_NX, _ = _attend(q_QND, k_HND, v_HND, causal_NN)
        hidden_NM = _finish(layer, hidden_NM, out_NX)
    return chunk_kv


@torch.no_grad()
def blend(
    model: Any,
    segments: Sequence[tuple[Sequence[int], KV | None]],
    ratio: float = 0.14,
    by: Literal["question", "deviation"] = "question",
) -> tuple[Tensor, KV, list[Tensor]]:
    """Blend a prompt's segments.

    Args:
        model: a Hugging Face Llama in float32 on the CPU.
        segments: token ids and KV of each segment, in order. Segments without KV are computed fresh; the question is the last.
        ratio: share of the tokens with KV to recompute, in the mean over layers 1 and up.
        by: choice of tokens: the question's attention (the default of this project) or KV deviation (the paper's, §4.3).

    Returns:
        Logits (V,) after the prompt; its KV, keys rotated; and the positions that ran through each layer.
    """
    ids_N = torch.tensor([token for ids, _ in segments for token in ids])
    reusable_N = torch.cat([torch.full((len(ids),), kv is not None) for ids, kv in segments])
    everywhere_N, layers = torch.arange(len(ids_N)), model.model.layers
    fresh, reusable = int((~reusable_N).sum()), int(reusable_N.sum())
    counts = SCHEDULES[by].counts(reusable, len(layers), ratio, fresh)

    # 1. Lay the stored KV out at the segments' new positions, and rotate its keys there.
    cache = _lay_out(model, segments)

    # 2. Score the tokens: the question runs over the stored KV, and each layer adds the attention of its rows, and of the last.
    attention_LN = torch.zeros(len(layers), len(ids_N))
    if by == "question" and 0 < ratio < 1:
        attention_LN = _question_attention(model, ids_N, reusable_N, cache)
        attention_LN[:, _bridges([ids for ids, kv in segments if kv is not None], reusable_N)] *= BRIDGE_WEIGHT
    rows_S = _choose(everywhere_N, reusable_N, attention_LN[0], counts[0])

    # 3. Run the chosen tokens through the layers, fewer from layer to layer, against the stored KV of all others.
    hidden_SM, recomputed = model.model.embed_tokens(ids_N[rows_S]), list[Tensor]()
    for layer, module in enumerate(layers):
        k_HND, v_HND = cache[layer]
        q_QSD, k_HSD, v_HSD = _project(module, hidden_SM)
        q_QSD, k_HSD = (_rotate(model, x, rows_S) for x in (q_QSD, k_HSD))
        score_N = attention_LN[layer]
        if by == "deviation":  # the distance of stored from fresh KV (§4.1)
            deviation_S = torch.cat([k_HSD - k_HND[:, rows_S], v_HSD - v_HND[:, rows_S]], dim=-1).square().sum((0, 2))
            score_N = torch.zeros(len(ids_N)).index_copy(0, rows_S, deviation_S)
        k_HND[:, rows_S], v_HND[:, rows_S] = k_HSD, v_HSD  # fresh KV stays, also that of tokens that go no further
        if layer > 0:
            chosen_S = torch.isin(rows_S, _choose(rows_S, reusable_N, score_N, counts[layer]))
            rows_S, q_QSD, hidden_SM = rows_S[chosen_S], q_QSD[:, chosen_S], hidden_SM[chosen_S]
        visible_SN = everywhere_N <= rows_S[:, None]  # the exact mask: each row's own position, not its row number
        out_SX, _ = _attend(q_QSD, k_HND, v_HND, visible_SN)
        hidden_SM = _finish(module, hidden_SM, out_SX)
        recomputed.append(rows_S)
    return model.lm_head(model.model.norm(hidden_SM[-1])), cache, recomputed


def _lay_out(model: Any, segments: Sequence[tuple[Sequence[int], KV | None]]) -> KV:
    """The prompt's KV, keys rotated: each segment's stored KV at its place, zeros where none is stored."""
    everywhere_N = torch.arange(sum(len(ids) for ids, _ in segments))
    cache: KV = []
    for layer, module in enumerate(model.model.layers):
        heads, size = model.config.num_key_value_heads, module.self_attn.head_dim
        parts = [kv[layer] if kv is not None else torch.zeros(2, heads, len(ids), size) for ids, kv in segments]
        k_HND, v_HND = (torch.cat(same, dim=1) for same in zip(*parts, strict=True))
        cache.append((_rotate(model, k_HND, everywhere_N), v_HND))
    return cache


def _question_attention(model: Any, ids_N: Tensor, reusable_N: Tensor, cache: KV) -> Tensor:
    """Attention (L, N) of the question's tokens, and of the last, to the stored KV, summed over a layer and those after it.

    The last question tokens run, and fresh tokens at the prompt's start: the first one is the attention sink.
    """
    where = reusable_N.nonzero()[:, 0]
    question = torch.arange(max(int(where[-1]) + 1, len(ids_N) - MAX_QUESTION_TOKENS), len(ids_N))
    rows_S = torch.cat([torch.arange(min(int(where[0]), MAX_START_TOKENS)), question])
    known_N = reusable_N.clone()
    known_N[rows_S] = True
    visible_SN = known_N & (torch.arange(len(ids_N)) <= rows_S[:, None])
    hidden_SM = model.model.embed_tokens(ids_N[rows_S])
    attention_LN = torch.zeros(len(cache), len(ids_N))
    for layer, module in enumerate(model.model.layers[:-1]):
        k_HND, v_HND = (x.clone() for x in cache[layer])
        q_QSD, k_HSD, v_HND[:, rows_S] = _project(module, hidden_SM)
        k_HND[:, rows_S] = _rotate(model, k_HSD, rows_S)
        out_SX, weights_QSN = _attend(_rotate(model, q_QSD, rows_S), k_HND, v_HND, visible_SN)
        if layer > 0:  # layer 0's stored KV is exact
            for rows in (weights_QSN[:, -len(question) :], weights_QSN[:, -1:]):
                attention_N = rows.mean((0, 1))
                attention_LN[layer] += attention_N / attention_N[reusable_N].sum() / 2
        hidden_SM = _finish(module, hidden_SM, out_SX)
    attention_LN[-1] = attention_LN[-2]
    attention_LN[:-1] = attention_LN[:-1].flip(0).cumsum(0).flip(0)
    return attention_LN


def _bridges(chunks: Sequence[Sequence[int]], reusable_N: Tensor) -> Tensor:
    """Positions of tokens that link chunks: three in a row that occur in two chunks, and in at most half of them."""
    runs = [[tuple(ids[start : start + 3]) for start in range(len(ids) - 2)] for ids in chunks]
    found = Counter(run for of_chunk in runs for run in set(of_chunk))
    most, linking = max(2, len(chunks) // 2), list[bool]()
    for ids, of_chunk in zip(chunks, runs, strict=True):
        starts = {start for start, run in enumerate(of_chunk) if 1 < found[run] <= most}
        linking += [not starts.isdisjoint(range(place - 2, place + 1)) for place in range(len(ids))]
    return reusable_N.nonzero()[:, 0][torch.tensor(linking)]


def _choose(rows_S: Tensor, reusable_N: Tensor, score_N: Tensor, count: int) -> Tensor:
    """The rows that go on: all fresh tokens, and the `count` reusable ones of highest score."""
    candidates_C = rows_S[reusable_N[rows_S]]
    if count < len(candidates_C):
        candidates_C = candidates_C[score_N[candidates_C].topk(count).indices]
    return torch.cat([rows_S[~reusable_N[rows_S]], candidates_C]).sort().values


def _project(layer: Any, hidden_SM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (Q, S, D), keys and values (H, S, D) of rows at a layer's input, before RoPE."""
    attention, normed_SM = layer.self_attn, layer.input_layernorm(hidden_SM)
    q, k, v = (
        project(normed_SM).view(len(hidden_SM), -1, attention.head_dim).transpose(0, 1)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    return q, k, v


def _attend(q_QSD: Tensor, k_HND: Tensor, v_HND: Tensor, visible_SN: Tensor) -> tuple[Tensor, Tensor]:
    """Attention output (S, Q x D) and weights (Q, S, N); each KV head serves Q / H query heads."""
    k_QND, v_QND = (x.repeat_interleave(len(q_QSD) // len(x), dim=0) for x in (k_HND, v_HND))
    scores_QSN = q_QSD @ k_QND.transpose(1, 2) * q_QSD.shape[-1] ** -0.5
    weights_QSN = scores_QSN.masked_fill(~visible_SN, -torch.inf).softmax(dim=-1)
    return (weights_QSN @ v_QND).transpose(0, 1).flatten(1), weights_QSN


def _finish(layer: Any, hidden_SM: Tensor, out_SX: Tensor) -> Tensor:
    """A layer's output: residuals, output projection and MLP."""
    hidden_SM = hidden_SM + layer.self_attn.o_proj(out_SX)
    output_SM: Tensor = hidden_SM + layer.mlp(layer.post_attention_layernorm(hidden_SM))
    return output_SM


def _rotate(model: Any, x_HSD: Tensor, positions_S: Tensor) -> Tensor:
    """RoPE: queries or keys rotated to their positions."""
    cos_1SD, sin_1SD = model.model.rotary_emb(x_HSD, positions_S[None])
    first, second = x_HSD.chunk(2, dim=-1)
    rotated_HSD: Tensor = x_HSD * cos_1SD + torch.cat([-second, first], dim=-1) * sin_1SD
    return rotated_HSD
