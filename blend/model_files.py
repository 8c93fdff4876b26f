"""A model and its tokenizer, by directory, GGUF file, known name or hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend.base.errors import InputError, UnsupportedModelError

from .compute_dtype import DTypeOption, choose_dtype
from .fingerprint import fingerprint_directory, fingerprint_module
from .gguf_file import convert_gguf, is_gguf, load_gguf_tokenizer
from .known_models import KNOWN_MODELS, fetched_folder

NO_CODE = {"trust_remote_code": False}  # left out, transformers asks at a terminal, and runs it where one says yes
_TOKENIZER = ("tokenizer*.json", "*.model", "vocab*", "*.tiktoken")


def locate_model(path_or_hub_id: str) -> str:
    """Find what transformers loads for a model: its folder, if it is on this machine; else the hub id.

    A GGUF file is converted when it is used for the first time, see `convert_gguf`.

    Raises:
        InputError: a folder that holds no model, a GGUF file that cannot be used, or a known model that was not fetched.
        UnsupportedModelError: a GGUF file of an architecture that cannot be blended.

    """
    name = str(path_or_hub_id)
    if is_gguf(name):
        return str(convert_gguf(Path(name)))
    if (Path(name) / "config.json").is_file():
        return name
    if name in KNOWN_MODELS:
        return str(fetched_folder(KNOWN_MODELS[name]))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        files = sorted(Path(name).glob("*.gguf")) if Path(name).is_dir() else []
        remedy = f"name the GGUF file itself, such as {files[0]}" if files else "give a directory, a GGUF file or a hub id"
        raise InputError(f"no model at {name!r}: it is not a model directory, as it has no config.json; {remedy}")
    return name


def load_model(
    path_or_hub_id: str, device: str | torch.device, dtype: DTypeOption, **kwargs: Any
) -> tuple[PreTrainedModel, str]:
    """The causal LM in evaluation mode, and its fingerprint. Never runs code that comes with a model.

    Args:
        path_or_hub_id: see `locate_model`.
        device: where it shall run.
        dtype: what it shall compute in; for "auto" see `choose_dtype`.
        kwargs: for transformers.

    Raises:
        InputError: no model there, or its files cannot be read.
        UnsupportedModelError: transformers has no causal LM for it.

    """
    name = locate_model(path_or_hub_id)
    try:
        if not isinstance(dtype, torch.dtype):
            dtype = choose_dtype(_checkpoint_dtype(name, kwargs), device)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **{**kwargs, **NO_CODE})
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} needs Python code of its own, which is never run; use another model"
            ) from error
        if "Unrecognized" in str(error) or "model type" in str(error):
            raise UnsupportedModelError(f"transformers knows no causal LM for {name!r}: {error}") from error
        raise InputError(f"the model {name!r} cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise InputError(f"the weights of {name!r} are damaged ({error}); fetch or save them again") from error
    except OSError as error:
        raise InputError(
            f"no model at {name!r}: give a model directory, a GGUF file, a hub id where the hub can be reached, "
            f"or a known name ({', '.join(KNOWN_MODELS)})"
        ) from error
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
    """The model's tokenizer, or None where the directory has none: transformers would make an empty one for some families.

    Raises:
        InputError, UnsupportedModelError: see `locate_model`; or a GGUF file that has none, see `load_gguf_tokenizer`.

    """
    if is_gguf(str(path_or_hub_id)):
        return load_gguf_tokenizer(Path(path_or_hub_id))
    name = locate_model(path_or_hub_id)
    if Path(name).is_dir() and not any(file.is_file() for pattern in _TOKENIZER for file in Path(name).glob(pattern)):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, **_where(kwargs), **NO_CODE)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def _checkpoint_dtype(name: str, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a model's config names, if it names one."""
    config: Any = kwargs.get("config") or AutoConfig.from_pretrained(name, **_where(kwargs), **NO_CODE)
    named = config.get_text_config(decoder=True).dtype or config.dtype
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named), None)


def _where(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {option: kwargs[option] for option in ("revision", "cache_dir", "subfolder") if option in kwargs}
