"""Prompts, KV and models that cannot be used are refused with a remedy."""

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
from cacheblend.blend import FusionConfig, Fusor, IncompatibleKVError, Segment, UnsupportedModelError
from cacheblend.blend import fusor as fusor_module
from cacheblend.blend.anatomy import LayerAnatomy
from cacheblend.blend.loading import load_model, load_tokenizer
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
INDEXED = {**TINY, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 1}
INDEXED |= {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        (
            "gpt2",
            {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
            "gpt2 models cannot be blended: positions are in",
        ),
        ("mamba", {**TINY, "state_size": 4}, "mamba models do not go on from a state: its forward returns no cache"),
        ("gpt_neox_japanese", {**TINY, "intermediate_multiple_size": 2}, "its attention is its own code"),
        ("llama", {**TINY, "sliding_window": 8}, "sliding window of 8 tokens.*config.json"),
        ("llama", {**LAYERS, "is_causal": False}, "attention is bidirectional"),
        ("deepseek_v32", INDEXED, "an indexer chooses the keys"),
        ("t5", {"vocab_size": 64, "d_model": 32, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}, "encoder-decoder"),
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


def furthest_from_prefill(fusor: Fusor, segments: list[Segment]) -> float:
    fused = fusor.fuse(segments, FusionConfig(recompute_ratio=1.0))
    return float((fused.logits - fusor.prefill(fused.token_ids).logits).abs().max())


def test_prompts_beyond_the_length_at_which_a_dynamic_rope_changes() -> None:
    """A rope that changes with every length blends up to where it does; a longer prompt is refused with the limit."""
    shape = {**TINY, "max_position_embeddings": 64, "rope_parameters": DYNAMIC}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.mul_(8 if "proj" in name else 1)  # so that a wrong rotation shows
    fusor = Fusor(model)
    ids = [1 + index % 60 for index in range(65)]
    assert furthest_from_prefill(fusor, [Segment(ids[:30], fusor.precompute(ids[:30])), Segment(ids[30:64])]) < 1e-4
    with pytest.raises(PromptTooLongError, match="64 positions"):
        fusor.fuse([Segment(ids)])
    fusor.max_positions = 128  # without the limit, the prefix of a short prompt is wrong in a long one
    steps, run = fusor.prefix_steps(ids[:40])
    steps.run()
    assert furthest_from_prefill(fusor, [Segment(ids[:40], run, exact=True), Segment(ids[40:64])]) < 1e-4
    assert furthest_from_prefill(fusor, [Segment(ids[:40], run, exact=True), Segment(ids[40:])]) > 1e-3


def test_prompts_beyond_the_length_before_a_yarn() -> None:
    """A yarn's factor lengthens prompts, though the config names the positions of before, as Qwen's model cards say."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model("llama", **LAYERS, max_position_embeddings=64, rope_parameters=yarn)
    fusor, ids = Fusor(AutoModelForCausalLM.from_config(config)), [1 + index % 60 for index in range(128)]
    assert furthest_from_prefill(fusor, [Segment(ids[:90], fusor.precompute(ids[:90])), Segment(ids[90:])]) < 1e-4


def test_an_unverified_family_is_checked_against_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag an unverified family is taken if blending is exact where it must be, and refused where it is not."""
    monkeypatch.setattr(fusor_module, "VERIFIED", frozenset({"llama"}))
    works = tiny_model("qwen3")
    with pytest.raises(UnsupportedModelError, match="allow_unverified"):
        Fusor(works)
    assert Fusor(works, allow_unverified=True).fuse([Segment([1, 2, 3])]).logits.shape == (97,)
    monkeypatch.setattr(LayerAnatomy, "rotate", lambda _, k, *__, **___: k)
    with pytest.raises(UnsupportedModelError, match="off by"):
        Fusor(works, allow_unverified=True)


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
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}')
    with pytest.raises(InputError, match="cannot be read"):
        load_tokenizer(str(tmp_path.parent), subfolder=tmp_path.name)


def test_weight_files_that_are_not_loaded(tmp_path: Path) -> None:
    """They do not change a folder's fingerprint; a variant of the weights has its own."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    _, fingerprint = load_model(str(tmp_path), "cpu", "auto")
    (tmp_path / "consolidated.safetensors").write_bytes(b"")
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert load_model(str(tmp_path), "cpu", "auto")[1] == fingerprint
    tiny_model("qwen2", seed=1).save_pretrained(tmp_path, variant="other")
    assert load_model(str(tmp_path), "cpu", "auto")[1] != load_model(str(tmp_path), "cpu", "auto", variant="other")[1]


@pytest.mark.parametrize("change", [{"quantization_config": {"quant_method": "awq"}}, {"hidden_act": "nope"}])
def test_a_config_that_asks_for_what_is_not_there(change: dict[str, Any], tmp_path: Path) -> None:
    """A package that is not installed, and a name that transformers does not know, are named."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LAYERS)).save_pretrained(tmp_path)
    AutoConfig.for_model("llama", **LAYERS, **change).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"cannot be loaded \((ImportError: .*gptqmodel|KeyError: 'nope')"):
        Fusor.from_pretrained(str(tmp_path))


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
