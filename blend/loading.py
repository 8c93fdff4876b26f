"""Loading of models: from a directory, a GGUF file, a known name or a hub id; their dtype, tokenizer and shape of KV."""

from __future__ import annotations

import functools
import time
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch.nn.functional import linear

from cacheblend.base.errors import InputError, UnsupportedModelError

from .families import drops_softcap, fingerprint_directory, fingerprint_module
from .gguf_file import convert_gguf, has_tokenizer_files, is_gguf, load_gguf_tokenizer
from .layer_source import KVGeometry
from .models import KNOWN_MODELS, NEAR, fetched_folder, find_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTypeOption = torch.dtype | Literal["auto", "float32", "bfloat16", "float16"]
_HALF = (torch.bfloat16, torch.float16)
_SIZE = 512  # of the measured matrices: a few milliseconds, and long enough to tell hardware from emulation
_REPEATS = 5
# With hardware for it the CPU takes a quarter to a half of float32's time, without it as long or far longer.
_FAST = 0.8


def choose_dtype(checkpoint: torch.dtype | None, device: str | torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: the checkpoint's own, if it has 16 bits and the device computes it fast, else float32.

    So a float32 checkpoint stays float32 everywhere, and one 16-bit dtype never becomes the other, which would lose precision
    or range. What a GPU computes fast is known; what a CPU does is measured, once a process, for the dtype that is asked about.

    Args:
        checkpoint: the dtype that its config names; None where it names none, which counts as float32.
        device: where the model will run.

    """
    if checkpoint in _HALF and computes_fast(checkpoint, torch.device(device)):
        return checkpoint
    return torch.float32


def computes_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrix products in a 16-bit dtype are faster than in float32 on this device."""
    if device.type == "cuda":
        return dtype is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and relative_time(dtype) < _FAST


@functools.cache
def relative_time(dtype: torch.dtype) -> float:
    """The CPU's time for a linear layer in `dtype`, over that in float32; measured in turns, and the fastest of each counts."""
    best_s = dict.fromkeys((torch.float32, dtype), float("inf"))
    operands = {each: torch.ones(_SIZE, _SIZE, dtype=each) for each in best_s}
    for repeat in range(_REPEATS + 1):
        for each, square in operands.items():
            start = time.perf_counter()
            linear(square, square)
            if repeat:  # the first one warms up
                best_s[each] = min(best_s[each], time.perf_counter() - start)
    return best_s[dtype] / best_s[torch.float32]


NO_CODE = {"trust_remote_code": False}  # left out, transformers asks at a terminal, and runs it where one says yes


def locate_model(path_or_hub_id: str) -> str:
    """Find what transformers loads for a model: its folder, if it is on this machine; else the hub id.

    A GGUF file is converted when it is used for the first time, see `convert_gguf`.

    Raises:
        InputError: a folder that holds no model, a GGUF file that cannot be used, a known model that was not fetched, or a slip
            in its name.
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
    if "/" not in name and get_close_matches(name, KNOWN_MODELS, 1, NEAR):
        find_model(name)  # a slip: the hub would be asked for half a minute where it cannot be reached
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
        InputError: no such dtype, no model there, or its files cannot be read.
        UnsupportedModelError: transformers has no causal LM for it.

    """
    name = locate_model(path_or_hub_id)
    try:
        dtype = _resolve_dtype(dtype, name, device, kwargs)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **{**kwargs, **NO_CODE})
        if drops_softcap(model):
            model.set_attn_implementation("eager")
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
    if Path(name).is_dir() and not has_tokenizer_files(Path(name)):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **_where(kwargs), **NO_CODE)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def kv_geometry(path_or_hub_id: str, device: torch.device, dtype: DTypeOption) -> KVGeometry:
    """Shape and dtype of a model's KV by its config, without its weights; see `load_model`.

    Raises:
        InputError: no model there.
    """
    name = locate_model(path_or_hub_id)
    try:
        full = transformers.AutoConfig.from_pretrained(name, **NO_CODE)
    except (OSError, ValueError) as error:
        raise InputError(f"the config of the model {name!r} cannot be read: {error}") from error
    config: Any = full.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = _resolve_dtype(dtype, name, device, {"config": full})
    return KVGeometry(int(config.num_hidden_layers), int(config.num_key_value_heads), int(head_dim), dtype, device)


def _resolve_dtype(dtype: DTypeOption, name: str, device: str | torch.device, kwargs: dict[str, Any]) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return choose_dtype(_checkpoint_dtype(name, kwargs), device)
    named: torch.dtype | None = {str(each).removeprefix("torch."): each for each in (torch.float32, *_HALF)}.get(dtype)
    if named is None:
        raise InputError(f"dtype {dtype!r} is not one of auto, float32, bfloat16, float16, or a torch.dtype")
    return named


def _checkpoint_dtype(name: str, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a model's config names, if it names one."""
    config: Any = kwargs.get("config") or transformers.AutoConfig.from_pretrained(name, **_where(kwargs), **NO_CODE)
    named = config.get_text_config(decoder=True).dtype or config.dtype
    return named if isinstance(named, torch.dtype) else getattr(torch, str(named), None)


def _where(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {option: kwargs[option] for option in ("revision", "cache_dir", "subfolder") if option in kwargs}
