"""Tiny models written as GGUF files, the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny_models import VOCAB
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cacheblend.blend.families import drops_softcap

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_WINDOW = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# By llama.cpp's name of the architecture, up to a hyphen; gemma's soft caps and layer types are those that its configs assume.
CONFIGS: dict[str, Any] = {
    "gemma2": lambda: Gemma2Config(**_SHAPE, **_WINDOW),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, **_WINDOW),
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-3": lambda: LlamaConfig(**_SHAPE, head_dim=16, rope_parameters=_LLAMA_3),
    "phi3": lambda: Phi3Config(**_SHAPE),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=128),
}
_ALPHABET = ["<pad>", "<s>", "th", "Ġ", *(chr(code) for code in range(33, 126))]


def tiny_checkpoint(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family that GGUF files hold."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval()
    if drops_softcap(model):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start as one value
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_gguf(
    path: Path, model: PreTrainedModel, architecture: str, *, tokenizer: bool = True, name: str | None = None, **extra: Any
) -> Path:
    """Write a model's weights in float32, with `extra` keys of its architecture, or as one of another `name`."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, name or architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if architecture != "llama":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    for key, value in extra.items():
        if key == "split.count":
            writer.add_uint16(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{architecture}.{key}", value)
    if tokenizer:
        _add_tokenizer(writer)
    _add_weights(writer, model, architecture, head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_ALPHABET)
    writer.add_token_types([3, 3] + [1] * (len(_ALPHABET) - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


def _add_weights(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: str, head_dim: int) -> None:
    config: Any = model.config
    if config.rope_parameters.get("rope_type") == "llama3":
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy())
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored = weight.detach().clone()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp rotates neighbours, not halves
            stored = stored.reshape(-1, 2, head_dim // 2, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            stored = stored + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, stored.numpy())
