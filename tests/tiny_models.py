"""Tiny random models of every verified family, with weights sharpened so that a fault in mask, rotation or cache shows."""

import functools
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cacheblend.blend.families import drops_softcap

VOCAB = 97
WINDOW = 12
ROPE_BORDER = 128  # tokens beyond which a longrope turns by its long factors
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SLIDING = ["sliding_attention", "full_attention"] * 2
_GEMMA = _SHAPE | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": _SLIDING}


def _llama(**more: Any) -> PretrainedConfig:
    return LlamaConfig(**_SHAPE, **more)


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **more}}


CONFIGS: dict[str, Any] = {
    "llama": lambda: _llama(),
    "llama-bias": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(**_rope(rope_type="linear", factor=4.0)),
    "llama-llama3": lambda: _llama(
        **_rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-yarn": lambda: _llama(**_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
    "mistral-window": lambda: MistralConfig(**_SHAPE, head_dim=16, sliding_window=WINDOW),
    "mixtral": lambda: MixtralConfig(**_SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-window": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=24),
    "gemma2": lambda: Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma3": lambda: Gemma3TextConfig(
        **_GEMMA,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    ),
    "phi3": lambda: Phi3Config(
        **_SHAPE, **{"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}
    ),
    "phi3-longrope": lambda: Phi3Config(
        **_SHAPE,
        original_max_position_embeddings=ROPE_BORDER,
        **_rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[3.0] * 8),
    ),
    "phi3-window": lambda: Phi3Config(**_SHAPE, sliding_window=WINDOW),
    "gemma": lambda: AutoConfig.for_model("gemma", **_SHAPE, head_dim=16),
    "granite": lambda: AutoConfig.for_model(
        "granite", **_SHAPE, embedding_multiplier=2.0, residual_multiplier=0.7, logits_scaling=3.0, attention_multiplier=0.2
    ),
    "starcoder2": lambda: AutoConfig.for_model("starcoder2", **_SHAPE, use_bias=True, sliding_window=None),
    "qwen2-moe": lambda: AutoConfig.for_model("qwen2_moe", **_SHAPE, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3-moe": lambda: AutoConfig.for_model("qwen3_moe", **_SHAPE, **_EXPERTS, head_dim=16),
    "cohere": lambda: AutoConfig.for_model("cohere", **_SHAPE, logit_scale=0.5),
    "glm4": lambda: AutoConfig.for_model("glm4", **_SHAPE, head_dim=16, attention_bias=True),
    "olmo": lambda: AutoConfig.for_model("olmo", **_SHAPE, clip_qkv=None),
    "ministral": lambda: AutoConfig.for_model("ministral", **_SHAPE, head_dim=16, sliding_window=WINDOW),
    "seed-oss": lambda: AutoConfig.for_model("seed_oss", **_SHAPE, head_dim=16),
    "helium": lambda: AutoConfig.for_model("helium", **_SHAPE, head_dim=16),
}

_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, **_LINEAR}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}

# Models with state-space or linear-attention layers: (model type, what it needs beside the shape).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", {**_EXPERTS, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "qwen3-5": ("qwen3_5_text", {**_DELTA, "head_dim": 16}),
    "granite-hybrid": (
        "granitemoehybrid",
        {**_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "falcon-h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1, 3], "head_dim": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "jamba": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8},
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "moe"],
            **{
                "mamba_num_heads": 8,
                "mamba_head_dim": 16,
                "ssm_state_size": 16,
                "n_groups": 1,
                "chunk_size": 16,
                "head_dim": 16,
            },
            **{"n_routed_experts": 4, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 32},
            **{"n_group": 1, "topk_group": 1},
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {**_EXPERTS, **_LINEAR, **_LATENT, "linear_head_dim": 16, "linear_num_heads": 4, "num_local_experts": 4},
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            **{"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1},
            **{"num_key_value_heads": 4, "adapter_rank": 8},
        },
    ),
    "olmo-hybrid": ("olmo_hybrid", _DELTA),
    "minimax": ("minimax", {**_EXPERTS, **_LINEAR, "head_dim": 16, "num_local_experts": 4, "block_size": 16}),
}


@functools.cache
def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, vocab: int = VOCAB) -> PreTrainedModel:
    """A random model whose q, k, v and o weights are scaled up: with default ones a shifted mask changes next to nothing."""
    torch.manual_seed(seed)
    family, own = HYBRIDS.get(name, ("", {}))
    config = AutoConfig.for_model(family, **_SHAPE | own) if family else CONFIGS[name]()
    config.vocab_size = vocab
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if drops_softcap(model):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")):
                parameter.mul_(4.0)
            if "bias" in parameter_name:
                parameter.normal_(0, 0.5)
    model.eval()
    model.requires_grad_(False)
    return model
