"""Prompts of many shapes for the tiny models, and comparisons of caches."""

import torch
from tiny_models import VOCAB
from transformers import DynamicCache

from cacheblend.blend import FusionResult, Fusor, Segment
from cacheblend.store import ChunkKV

BOS = (1,)


def draw_ids(count: int, seed: int) -> list[int]:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunk(fusor: Fusor, tokens: int, seed: int, prefix: tuple[int, ...] = BOS) -> Segment:
    ids = draw_ids(tokens, seed)
    return Segment(ids, fusor.precompute(ids, prefix))


def rag_prompt(fusor: Fusor) -> list[Segment]:
    """A system text, chunks of 17, 1, 33 and 8 tokens (33 is beyond the window of 12), a hole, one chunk twice, a question."""
    first = chunk(fusor, 17, seed=1)
    return [
        Segment([*BOS, *draw_ids(5, seed=0)]),
        first,
        chunk(fusor, 1, seed=2),
        Segment(draw_ids(9, seed=3)),
        chunk(fusor, 33, seed=4),
        first,
        chunk(fusor, 8, seed=5),
        Segment(draw_ids(7, seed=6)),
    ]


def largest_difference(one: DynamicCache, other: DynamicCache) -> float:
    """Largest absolute difference of any key or value of two caches of the same shape."""
    layers = [pair for pair in zip(one.layers, other.layers, strict=True) if pair[0].keys is not None]  # they keep KV
    pairs = [(a, b) for x, y in layers for a, b in ((x.keys, y.keys), (x.values, y.values))]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def assert_full_prefill(fusor: Fusor, fused: FusionResult) -> None:
    """Logits and every layer's KV are those of the model's own forward, to rounding."""
    reference = fusor.prefill(fused.token_ids)
    assert float((fused.logits - reference.logits).abs().max()) <= 1e-4
    assert largest_difference(fused.cache, reference.cache) <= 1e-4


def assert_same_kv(one: ChunkKV, other: ChunkKV, tolerance: float = 1e-5) -> None:
    """Same tokens after the same prefix, and keys and values equal but for the rounding of larger products."""
    assert (one.token_ids, one.prefix_ids, one.model) == (other.token_ids, other.prefix_ids, other.model)
    for pair, twin in zip(one.layers, other.layers, strict=True):
        for x_HTD, y_HTD in zip(pair, twin, strict=True):
            torch.testing.assert_close(x_HTD, y_HTD, rtol=0, atol=tolerance * float(y_HTD.abs().max()))
