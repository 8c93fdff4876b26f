"""An independent, slow and plain replay of a fusion's sets: dense masks, no blocks, no scatter, eager attention.

Written from the method's description for Llama-like layers (separate q, k, v, no norms on them, full attention), it shares no
code with the package but the model's weights and its rotary module.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.blend import FusionResult, Segment


def rotate(x_HND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x_HND.shape[-1] // 2
    return x_HND * cos + torch.cat((-x_HND[..., half:], x_HND[..., :half]), -1) * sin


def replay(model: Any, segments: Sequence[Segment], fused: FusionResult) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and K and V of every layer, computed with hidden states of all N positions, stale ones poisoned with NaN."""
    base, config = model.model, model.config
    tokens = torch.tensor(fused.token_ids)
    count, heads, kv_heads = len(tokens), config.num_attention_heads, config.num_key_value_heads
    hidden = base.embed_tokens(tokens)
    cos, sin = (x[0] for x in base.rotary_emb(hidden, torch.arange(count)[None]))
    position = torch.arange(count)
    kept = []
    for index, layer in enumerate(base.layers):
        x = layer.input_layernorm(hidden)
        attention = layer.self_attn
        head_dim = attention.head_dim
        q, k, v = (
            projection(x).view(count, -1, head_dim).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        fresh = torch.isin(position, fused.projected[index])
        start = 0
        for segment in segments:
            stop = start + len(segment.token_ids)
            if segment.kv is not None:
                stale = ~fresh[start:stop]
                k[:, start:stop][:, stale] = segment.kv.layers[index][0][:, stale]
                v[:, start:stop][:, stale] = segment.kv.layers[index][1][:, stale]
            start = stop
        k = rotate(k, cos, sin)
        kept += [k, v]
        scores = rotate(q, cos, sin) @ k.repeat_interleave(heads // kv_heads, 0).transpose(1, 2) * attention.scaling
        scores = scores.masked_fill(position[None, None, :] > position[None, :, None], -torch.inf)
        mixed = torch.softmax(scores, -1) @ v.repeat_interleave(heads // kv_heads, 0)
        after = hidden + attention.o_proj(mixed.transpose(0, 1).reshape(count, -1))
        after = after + layer.mlp(layer.post_attention_layernorm(after))
        hidden = torch.full_like(after, torch.nan)
        hidden[fused.recomputed[index]] = after[fused.recomputed[index]]
    return model.lm_head(base.norm(hidden[-1])), kept
