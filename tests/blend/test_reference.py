"""The method in plain PyTorch is what the fusor computes."""

from typing import Literal

import pytest
import torch
from prompts import BOS, rag_prompt
from reference import blend, precompute
from tiny_models import tiny_model

from cacheblend.blend import FusionConfig, Fusor

SELECTORS = {"question": "question_attention", "deviation": "gradual"}


@pytest.mark.contract
@pytest.mark.parametrize("by", ["question", "deviation"])
@pytest.mark.parametrize("ratio", [0.0, 0.14, 0.3, 1.0])
def test_reference_is_the_fusor(by: Literal["question", "deviation"], ratio: float) -> None:
    """Logits, KV and the tokens that run through each layer are equal, at any ratio, by both selectors."""
    fusor = Fusor(tiny_model("llama"))
    segments = rag_prompt(fusor)
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=ratio, selector=SELECTORS[by]))
    plain = [(segment.token_ids, segment.kv and precompute(fusor.model, BOS, segment.token_ids)) for segment in segments]
    logits_V, cache, recomputed = blend(fusor.model, plain, ratio, by)
    assert [rows.tolist() for rows in recomputed] == [rows.tolist() for rows in fused.recomputed]
    torch.testing.assert_close(logits_V, fused.logits, rtol=0, atol=1e-4)
    for (k_HND, v_HND), layer in zip(cache, fused.cache.layers, strict=True):
        torch.testing.assert_close(k_HND, layer.keys[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(v_HND, layer.values[0], rtol=0, atol=1e-4)
