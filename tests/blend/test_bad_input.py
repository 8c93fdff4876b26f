"""Prompts, KV and models that cannot be used are refused with a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts import BOS, chunk, draw_ids
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cacheblend.base.errors import InputError, PromptTooLongError
from cacheblend.blend import Fusor, IncompatibleKVError, Segment, UnsupportedModelError
from cacheblend.store import ChunkKV

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def fusor() -> Fusor:
    return Fusor(tiny_model("llama"))


IDS, QUESTION = draw_ids(5, seed=1), Segment([5])


def changed(fusor: Fusor, change: Callable[[list[Any]], list[Any]]) -> list[Segment]:
    """A prompt up to its question, with a chunk of these tokens whose layers were changed, and whose model nobody knows."""
    return [Segment(BOS), Segment(IDS, ChunkKV(change(list(fusor.precompute(IDS, BOS).layers)), IDS, BOS))]


def exact(fusor: Fusor, ids: Sequence[int] = (1, 2)) -> Segment:
    """An exact segment, computed as a prompt's first."""
    return Segment(ids, fusor.precompute(ids), exact=True)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (lambda fusor: [Segment(IDS, fusor.precompute(draw_ids(5, seed=2)))], "other tokens"),
        (lambda _: [chunk(Fusor(tiny_model("llama", seed=1)), 5, seed=1)], "precompute it with this model"),
        (lambda fusor: changed(fusor, lambda layers: [(k.half(), v.half()) for k, v in layers]), "float16"),
        (lambda fusor: changed(fusor, lambda layers: layers[:2]), "heads, head size, dtype"),
        (lambda fusor: changed(fusor, lambda layers: [(k[:1], v[:1]) for k, v in layers]), "heads, head size, dtype"),
        (lambda fusor: [chunk(fusor, 5, seed=1), chunk(fusor, 5, seed=2, prefix=(2,))], "different prefixes"),
        (lambda fusor: [exact(fusor, BOS), exact(fusor, IDS)], "exact segment at position 1"),
    ],
    ids=["text", "model", "dtype", "depth", "heads", "prefix", "exact"],
)
def test_kv_of_something_else(fusor: Fusor, segments: Callable[[Fusor], list[Segment]], message: str) -> None:
    """KV of other tokens, another model, dtype or shape, and after other tokens than stand before it, is refused."""
    with pytest.raises(IncompatibleKVError, match=message):
        fusor.fuse([*segments(fusor), QUESTION])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda fusor: fusor.fuse([Segment([3]), exact(fusor), QUESTION]), InputError, "unbroken run"),
        (lambda fusor: fusor.fuse([exact(fusor)]), InputError, "every segment is exact"),
        (lambda _: Segment(IDS, exact=True), InputError, "needs its kv"),
        (lambda fusor: fusor.fuse([]), InputError, "at least one"),
        (lambda fusor: fusor.fuse([Segment([])]), InputError, "at least one"),
        (lambda fusor: fusor.prefill([]), InputError, "at least one"),
        (lambda fusor: fusor.precompute([]), InputError, "at least one"),
        (lambda fusor: fusor.fuse([Segment([5, 97])]), InputError, "97"),
        (lambda fusor: fusor.precompute([10**6]), InputError, "1000000"),
        (lambda fusor: fusor.fuse([Segment([5] * 513)]), PromptTooLongError, "513"),
        (lambda fusor: fusor.prefill([5] * 513), PromptTooLongError, "513"),
        (lambda fusor: fusor.precompute([5] * 513), PromptTooLongError, "513"),
    ],
)
def test_prompts(fusor: Fusor, call: Callable[[Fusor], object], error: type[Exception], message: str) -> None:
    """Misplaced exact segments, nothing to compute, unknown tokens and too many positions are refused by name."""
    with pytest.raises(error, match=message):
        call(fusor)


LAYERS = {**TINY, "num_key_value_heads": 2, "intermediate_size": 32}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI3 = {"pad_token_id": 0, "max_position_embeddings": 128, "original_max_position_embeddings": 64}
MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4}
SHARED_KV = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "head_dim": 16, "layer_types": None, "laurel_rank": 4}
SHARED_KV |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "altup_num_inputs": 2}
SHARED_KV |= {"activation_sparsity_pattern": None}
SHARED_KV["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
NEXT = {"head_dim": 16, "num_experts": 0, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("gpt2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}, "no layers, norm, rotary_emb"),
        ("mamba", {**TINY, "state_size": 4}, "mamba models.*state-space.*LinearAttentionLayer instead of keys and values"),
        ("bamba", {**LAYERS, **MAMBA}, "bamba models cannot be blended: it has state-space or .*be put together from chunks$"),
        ("gemma3n_text", {**LAYERS, **SHARED_KV}, "gemma3n_text models.*share another layer's KV"),
        ("qwen3_next", {**LAYERS, **NEXT}, "qwen3_next models.*LinearAttentionLayer instead of keys and values"),
        ("stablelm", LAYERS, "not among the verified families"),
        ("llama", {**TINY, "rope_parameters": DYNAMIC}, "'dynamic' changes with the prompt's length"),
        ("t5", {"vocab_size": 64, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
        ("phi3", {**LAYERS, **PHI3, "rope_parameters": LONG}, "'longrope' changes with the prompt's length"),
    ],
)
def test_unsupported_models_say_what_is_missing(family: str, shape: dict[str, Any], reason: str) -> None:
    """A model that blending is not right on is refused with what it lacks."""
    with pytest.raises(UnsupportedModelError, match=reason):
        Fusor(
            (AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM).from_config(
                AutoConfig.for_model(family, **shape)
            )
        )


def test_an_unverified_family_is_checked_against_its_own_forward() -> None:
    """With the flag an unverified family is taken if blending is exact where it must be, and refused where it is not."""
    shape = {**LAYERS, "pad_token_id": 0}
    works = AutoModelForCausalLM.from_config(AutoConfig.for_model("arcee", **shape)).eval()
    with pytest.raises(UnsupportedModelError, match="allow_unverified"):
        Fusor(works)
    assert Fusor(works, allow_unverified=True).fuse([Segment([1, 2, 3])]).logits.shape == (64,)
    without_rope_in_layer_1 = AutoConfig.for_model("smollm3", **shape, no_rope_layers=[1, 0])
    fails = AutoModelForCausalLM.from_config(without_rope_in_layer_1).eval()
    with torch.no_grad():
        for parameter in fails.model.layers.parameters():
            parameter.mul_(8)
    with pytest.raises(UnsupportedModelError, match="off by"):
        Fusor(fails, allow_unverified=True)


def test_no_model_at_a_path(tmp_path: Path) -> None:
    """A path without a model names itself."""
    with pytest.raises(InputError, match=r"nowhere.*config\.json"):
        Fusor.from_pretrained(str(tmp_path / "nowhere"))


def test_a_model_saved_without_its_tokenizer(tmp_path: Path) -> None:
    """A directory without tokenizer files gives no tokenizer, not the empty one that transformers would make up."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    fusor = Fusor.from_pretrained(str(tmp_path))
    assert fusor.tokenizer is None
    assert (
        fusor.fingerprint
        == Fusor.from_pretrained(str(tmp_path)).fingerprint
        != Fusor.from_pretrained(str(tmp_path), dtype=torch.bfloat16).fingerprint
    )


def test_code_that_comes_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs code of its own is refused; nobody at a terminal is asked whether to run it, and it does not run."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).write_text('x')\n")
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "its-own", "auto_map": auto_map}))
    with pytest.raises(UnsupportedModelError, match="code of its own, which is never run"):
        Fusor.from_pretrained(str(tmp_path))
    assert not asked
    assert not ran.exists()
