"""Model families: the verified ones, the reasons to refuse others, and the fingerprint of a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.base.files import make_folder, replacing, user_cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# For each, a tiny random model in the tests must have full prefill's logits and KV at ratio 1.0.
VERIFIED = (
    "cohere",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "granite",
    "helium",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "starcoder2",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_model(model: PreTrainedModel, *, allow_unverified: bool) -> None:
    """Refuse a model that blending would be wrong on; the message names the reasons.

    Raises:
        UnsupportedModelError: the family is not verified (unless allowed), the rope changes with the prompt's length, or layers
            hold another state than keys and values or attend to the future.
    """
    config: Any = model.config.get_text_config(decoder=True)
    family = str(config.model_type)
    if reason := _hidden_parts(model, config):
        raise UnsupportedModelError(f"{family} models cannot be blended: {reason}")
    if reasons := list(_refused_details(model, config)):
        raise UnsupportedModelError(f"{family} models cannot be blended: {'; '.join(reasons)}")
    if family not in VERIFIED and not allow_unverified:
        raise UnsupportedModelError(
            f"{family} is not among the verified families ({', '.join(VERIFIED)}); pass allow_unverified=True "
            "(--allow-unverified) to use it if the built-in check against its own forward passes"
        )


def drops_softcap(model: PreTrainedModel) -> bool:
    """Whether attention runs without the model's soft-capping, as Gemma 2 with sdpa in transformers before 5.21."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return capped is not None and str(model.config._attn_implementation) == "sdpa"


def _hidden_parts(model: PreTrainedModel, config: Any) -> str:
    """The part that a model lacks, and without which no other can be looked at; empty if it lacks none."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders are supported"
    if config is not model.config:
        return "it is a multimodal wrapper; load its text model"
    states = sorted(_kinds_of_state(model))
    if any("LinearAttention" in kind for kind in states):
        return (
            f"it has state-space or linear-attention layers ({', '.join(states)} instead of keys and values), whose one state "
            "of all tokens before cannot be put together from chunks"
        )
    absent = [part for part in ("layers", "norm", "rotary_emb") if not hasattr(model.get_decoder(), part)]
    return f"its decoder has no {', '.join(absent)}" if absent else ""


def _refused_details(model: PreTrainedModel, config: Any) -> Iterator[str]:
    """Each reason to refuse a decoder of layers."""
    layer = model.get_decoder().layers[0]
    if not hasattr(layer, "input_layernorm") or not hasattr(layer, "self_attn"):
        yield "its layers have no input_layernorm in front of self_attn"
    elif not (hasattr(layer.self_attn, "qkv_proj") or hasattr(layer.self_attn, "k_proj")):
        yield "its attention has neither k_proj and v_proj nor qkv_proj"
    for rope in sorted(_rope_types(config) - set(ROPE_TYPES)):
        yield f"rope type {rope!r} changes with the prompt's length (supported: {', '.join(ROPE_TYPES)})"
    if getattr(config, "clip_qkv", None) is not None:
        yield "its attention clips queries, keys and values (clip_qkv)"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "some layers share another layer's KV"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is bidirectional"
    if drops_softcap(model):
        yield "its soft-capped attention is not what transformers' sdpa computes; load it with attn_implementation='eager'"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        yield "chunked attention is not supported"
    for kind in sorted(_kinds_of_state(model)):
        yield f"a layer keeps a {kind} instead of keys and values"


def _kinds_of_state(model: PreTrainedModel) -> set[str]:
    """Kinds of state, by transformers' class names, that layers hold between tokens instead of keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(cache_layer) for cache_layer in DynamicCache(config=model.config).layers}
    return {kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer}}


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(rope.get("rope_type", "default")) for rope in per_type}


def weight_files(directory: Path) -> list[Path]:
    """The files of a model folder that hold its weights."""
    return sorted((*directory.glob("*.safetensors"), *directory.glob("*.bin")))


def fingerprint_directory(directory: Path, model: nn.Module, dtype: torch.dtype) -> str:
    """Fingerprint of a model in a directory: its config as it was loaded, `file_digest` of its weights, and `dtype`."""
    digest = _config_digest(model, dtype)
    for shard in weight_files(directory):
        digest.update(f"{shard.name}:{file_digest(shard)}\n".encode())
    return digest.hexdigest()


def fingerprint_module(model: nn.Module, dtype: torch.dtype) -> str:
    """Fingerprint of a model in memory, over its config, the bytes of its parameters and buffers, and `dtype`."""
    digest = _config_digest(model, dtype)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _config_digest(model: nn.Module, dtype: torch.dtype) -> hashlib._Hash:
    config: Any = model.config
    volatile = {"_name_or_path", "transformers_version", "dtype"}
    stable = {name: value for name, value in config.to_dict().items() if name not in volatile}
    return hashlib.sha256(f"{dtype}\n{json.dumps(stable, sort_keys=True, default=str)}\n".encode())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex.

    The user's cache folder holds it by real path, size and modification time, so that a large file is hashed once.
    """
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    target, known = user_cache_folder() / "fingerprints.json", dict[str, str]()
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(target.read_text()))
    if identity not in known:
        with path.open("rb") as file:
            known[identity] = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            make_folder(target.parent)
            with replacing(target) as written:
                written.write(json.dumps(known).encode())
        except OSError as error:
            logger.info("weight digests are not remembered in %s: %s", target, error)
    return str(known[identity])
