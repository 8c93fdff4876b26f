"""Families with a speciality inside vLLM: sinks, shapes of KV a layer, shared KV, latent attention, models that see images."""

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from make_random_model import CHAT_TEMPLATE, ModelShape, python_help, train_tokenizer
from transformers import AutoConfig
from vllm_engines import VOCAB, OpenServed, first_logprobs, open_engine

from cacheblend.base.errors import UnsupportedModelError

pytestmark = pytest.mark.contract

PROMPTS = int(os.environ.get("FAMILY_PROMPTS", "3"))  # CI's; by hand 100
TEXT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "sliding_window": 12,
        "initializer_range": 0.05,
    },
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA4 = TEXT | {"layer_types": LAYERS * 2, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB}
GEMMA4_E = GEMMA4 | {"num_hidden_layers": 6, "layer_types": LAYERS * 3, "num_kv_shared_layers": 2, "attention_k_eq_v": False}
GEMMA4_E |= {"hidden_size_per_layer_input": 8, "num_global_key_value_heads": None}
LATENT: dict[str, Any] = {name: TEXT[name] for name in TEXT.keys() - {"sliding_window", "pad_token_id"}}
LATENT |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4, "head_dim": 32}
DEEPSEEK = LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 3, "n_routed_experts": 4}
DEEPSEEK |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": LAYERS * 2}
# The compiled rotary embedding of vLLM 0.32's CPU build turns nothing in latent attention.
NATIVE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
VISION = {"hidden_size": 32, "intermediate_size": 48}
SIGLIP = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14, **VISION}
PATCHES = {"patch_size": 14, "merge_size": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
IMAGE = VOCAB - 8  # the first token after the tokenizer's own
# Architecture, text model, vision model, tokens, and the files of the processors.
WRAPPERS: dict[str, tuple[Any, ...]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "layer_types": LAYERS * 2},
        {"model_type": "siglip_vision_model", **SIGLIP},
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": IMAGE + 1, "eoi_token_index": IMAGE + 2},
        {"processor_class": "Gemma3Processor"},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", "head_dim": 16, **SIGLIP},
        {"image_token_index": IMAGE, "spatial_merge_size": 1},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 1, "image_token": "[IMG]"},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 28}},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"model_type": "qwen3_vl_text", "sliding_window": None, "rope_parameters": MROPE},
        {"depth": 2, "num_heads": 2, "out_hidden_size": 128, "patch_size": 14, "deepstack_visual_indexes": [0], **VISION},
        {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8},
        {"processor_class": "Qwen3VLProcessor"},
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 784, "longest_edge": 3136},
            **PATCHES,
        },
        {"video_processor_type": "Qwen3VLVideoProcessor", **PATCHES},
    ),
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_oss": (TEXT | EXPERTS, {}),
    "cohere2": (TEXT | {"layer_types": LAYERS * 2}, {}),
    "exaone4": (TEXT | {"layer_types": LAYERS * 2}, {}),
    "gemma4_text": (GEMMA4, {}),
    "gemma4_text-e": (GEMMA4_E, {}),
    "phi3": (TEXT | {"sliding_window": None, "original_max_position_embeddings": 128, "rope_parameters": LONGROPE}, {}),
    "minicpm3": (LATENT, {}),
    "deepseek_v2": (DEEPSEEK | {"topk_method": "greedy", "n_shared_experts": 1}, NATIVE),
    "deepseek_v3": (DEEPSEEK | {"topk_method": "noaux_tc", "n_shared_experts": 1}, NATIVE),
}
# What vLLM 0.32's CPU build runs: delta rules in bfloat16, Mamba 2 without prefix caching.
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4, "head_dim": 128}
MAMBA: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
MAMBA |= {"mamba_n_groups": 1, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4}
LONG = {"max_position_embeddings": 1024}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
HYBRIDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_next": (TEXT | SPARSE | DELTA | LONG, {"dtype": "bfloat16", "enable_prefix_caching": True}),
    "granitemoehybrid": (TEXT | MAMBA | LONG, {"enable_prefix_caching": False}),
}
CHUNK_TOKENS = (70, 66, 72, 50, 90, 40)


def write_model(folder: Path, family: str) -> Path:
    """A tiny random model of a family, whose attention matters and whose sinks are not zero."""
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(family.removesuffix("-e"), **(FAMILIES | HYBRIDS)[family][0])
    save(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)
    tokenizer(VOCAB).save_pretrained(folder)
    return folder


def save(model: Any, folder: Path) -> None:
    """Write a model, with weights large enough that a fault shows."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj" in name and "self_attn" in name and "vision" not in name:
                weight.mul_(3.0)
            if weight.ndim == 1 and not bool(weight.any()):
                weight.normal_(0, 0.5)
    model.save_pretrained(folder)


def tokenizer(vocab: int) -> Any:
    made = train_tokenizer(python_help()[:20], ModelShape(vocab=vocab, max_positions=512))
    made.chat_template = CHAT_TEMPLATE
    return made


def write_wrapper(folder: Path, family: str) -> Path:
    """A tiny model that sees images, with what vLLM's processor asks of its tokenizer."""
    torch.manual_seed(0)
    architecture, text, vision, more, *processors = WRAPPERS[family]
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    made = tokenizer(VOCAB - 8)
    special = (
        [*names.values(), *("\n" * count for count in range(1, 5))]
        if family == "gemma3"
        else ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    )
    made.add_tokens(special, special_tokens=True)
    text_config = AutoConfig.for_model(**TEXT | text).to_dict()
    config: Any = AutoConfig.for_model(family, text_config=text_config, vision_config=vision, **more)
    save(getattr(transformers, architecture)._from_config(config, dtype=torch.float32), folder)
    made.save_pretrained(folder)
    if family == "gemma3":
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | names | {"extra_special_tokens": names}))
    for file, settings in zip(("processor", "preprocessor", "video_preprocessor"), processors, strict=False):
        (folder / f"{file}_config.json").write_text(json.dumps(settings))
    return folder


def check_exact(served: Any) -> None:
    """At ratio 1.0 every prompt's answer is vLLM's own; at a lower ratio it is a blend."""
    draw = random.Random(5)
    chunks = [[draw.randrange(9, VOCAB - 8) for _ in range(tokens)] for tokens in CHUNK_TOKENS]
    served.precompute(chunks)
    blended = 0.0
    for _ in range(PROMPTS):
        tokens, spans = [draw.randrange(9, VOCAB - 8) for _ in range(draw.choice((10, 40, 70)))], list[list[int]]()
        for chunk in draw.sample(chunks, 3):
            spans.append([len(tokens), len(tokens) + len(chunk)])
            tokens += chunk
        tokens += [draw.randrange(9, VOCAB - 8) for _ in range(draw.randrange(3, 12))]
        served.llm.reset_prefix_cache()
        exact = served.ask(tokens)
        served.llm.reset_prefix_cache()
        whole, part = served.ask(tokens, spans, ratio=1.0), served.ask(tokens, spans)
        assert whole.kv_transfer_params["cacheblend"]["hits"] == 3, whole.kv_transfer_params
        assert whole.outputs[0].token_ids == exact.outputs[0].token_ids
        assert float((first_logprobs(whole) - first_logprobs(exact)).abs().max()) < 1e-3
        blended = max(blended, float((first_logprobs(part) - first_logprobs(exact)).abs().max()))
    assert blended > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_is_vllms_own(family: str, tmp_path: Path, open_served: OpenServed) -> None:
    """Blending at ratio 1.0 gives vLLM's own tokens, whatever a family's layers cache."""
    with open_served(write_model(tmp_path / "model", family), **FAMILIES[family][1]) as served:
        check_exact(served)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM loads the images' processor, which needs torchvision")
@pytest.mark.parametrize("family", WRAPPERS)
def test_text_requests_of_a_model_that_sees_images(family: str, tmp_path: Path, open_served: OpenServed) -> None:
    """The text model inside a wrapper is blended."""
    with open_served(write_wrapper(tmp_path / "model", family), limit_mm_per_prompt={"image": 0, "video": 0}) as served:
        check_exact(served)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_are_left_to_vllm(family: str, tmp_path: Path) -> None:
    """With layers that keep a state every token and prefix cache hit is vLLM's own; chunks' marks get the reason."""
    draw = random.Random(5)
    heads = [[draw.randrange(9, VOCAB) for _ in range(600)] for _ in range(2)]
    prompts = [draw.choice(heads) + [draw.randrange(9, VOCAB) for _ in range(draw.randrange(5, 90))] for _ in range(20)]
    answers = list[list[tuple[Any, ...]]]()
    model = write_model(tmp_path / "model", family)
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "block_size": None, **HYBRIDS[family][1]}
    for store, chunks in ((None, None), (tmp_path / "store", [[10, 80], [80, 150]])):
        with open_engine(model, store, **settings) as served:
            given = [served.ask(tokens, chunks) for tokens in prompts]
            if chunks:
                assert served.llm.collective_rpc("cacheblend_precompute", args=([heads[0][:70]], [0], None)) == [[0, 0, 0]]
                reports = [output.kv_transfer_params["cacheblend"] for output in given]
                assert reports == [{"blended": False, "reason": "hybrid_model"}] * len(prompts)
        answers.append([(output.outputs[0].token_ids, output.num_cached_tokens) for output in given])
    assert answers[0] == answers[1]
    assert any(cached for _, cached in answers[0]) == HYBRIDS[family][1]["enable_prefix_caching"]


def test_latent_attention_that_is_not_rotated_is_refused(tmp_path: Path, open_served: OpenServed) -> None:
    """Where vLLM's own rotary embedding does nothing, the engine does not start, and the error names the remedy."""
    folder = write_model(tmp_path / "model", "deepseek_v2")
    with pytest.raises(UnsupportedModelError, match="-rotary_embedding"), open_served(folder):
        pass
