"""Loads a model and its tokenizer from a directory or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend.store.errors import InputError, UnsupportedModelError

from .fingerprint import fingerprint_directory, fingerprint_module

_TOKENIZER = ("tokenizer*.json", "*.model", "vocab*", "*.tiktoken")


def load_model(
    path_or_hub_id: str, device: str | torch.device, dtype: torch.dtype, **kwargs: Any
) -> tuple[PreTrainedModel, str]:
    """The causal LM in evaluation mode, and its fingerprint. Never runs code that comes with a model.

    Raises:
        InputError: no model there, or its files cannot be read.
        UnsupportedModelError: transformers has no causal LM for it.

    """
    name = str(path_or_hub_id)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (Path(name) / "config.json").is_file():
        raise InputError(f"{name!r} is not a model directory: it has no config.json; give a directory or a hub id")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
    except ValueError as error:
        if "Unrecognized" in str(error) or "model type" in str(error):
            raise UnsupportedModelError(f"transformers knows no causal LM for {name!r}: {error}") from error
        raise InputError(f"the model {name!r} cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise InputError(f"the weights of {name!r} are damaged ({error}); fetch or save them again") from error
    except OSError as error:
        raise InputError(f"no model at {name!r}: give a model directory, or a hub id where the hub can be reached") from error
    if "device_map" not in kwargs and "quantization_config" not in kwargs:
        model.to(device)
    model.eval()
    model.requires_grad_(False)
    if Path(name).is_dir():
        directory = Path(name) / kwargs.get("subfolder", "")
    else:
        where = {option: kwargs[option] for option in ("revision", "cache_dir") if option in kwargs}
        directory = Path(snapshot_download(name, local_files_only=True, **where)) / kwargs.get("subfolder", "")
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")):
        return model, fingerprint_directory(directory, model, dtype)
    return model, fingerprint_module(model, dtype)


def load_tokenizer(path_or_hub_id: str, **kwargs: Any) -> Any:
    """The model's tokenizer, or None where the directory has none: transformers would make an empty one for some families."""
    name = str(path_or_hub_id)
    if Path(name).is_dir() and not any(file.is_file() for pattern in _TOKENIZER for file in Path(name).glob(pattern)):
        return None
    try:
        where = {option: kwargs[option] for option in ("revision", "cache_dir", "subfolder") if option in kwargs}
        return AutoTokenizer.from_pretrained(name, **where)
    except (OSError, ValueError, KeyError, ImportError):
        return None
