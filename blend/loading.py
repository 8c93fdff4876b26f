"""Loading of models: from a directory, a GGUF file, a known name or a hub id; their dtype, tokenizer and shape of KV."""

import os
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers
from huggingface_hub import repo_exists, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from cacheblend.base.errors import InputError, UnsupportedModelError

from .compiled_file import has_feature
from .families import drops_softcap, exact_reason, fingerprint_directory, fingerprint_module, weight_files
from .gguf_file import convert_gguf, has_tokenizer_files, is_gguf, read_header
from .interfaces import KVGeometry
from .models import KNOWN_MODELS, find_model

DTypeOption = torch.dtype | str  # "auto", or a name of `DTYPES`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Instruction sets of CPUs, by the system's names: without one of them 16 bits are as slow as float32, or far slower.
FAST = {torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"), torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp")}
NO_CODE = {"trust_remote_code": False}  # left out, transformers asks at a terminal, and runs it where one says yes


def choose_dtype(checkpoint: torch.dtype | None, device: str | torch.device) -> torch.dtype:
    """The dtype that "auto" stands for: the checkpoint's own, if it has 16 bits and the device computes it fast, else float32.

    So a float32 checkpoint stays float32 everywhere, and one 16-bit dtype never becomes the other, which would lose precision
    or range. A checkpoint whose config names no dtype (None) counts as float32.
    """
    if checkpoint not in FAST:
        return torch.float32
    kind = torch.device(device).type
    is_fast = kind == "cpu" and any(map(has_feature, FAST[checkpoint]))
    if kind == "cuda":
        is_fast = checkpoint is torch.float16 or torch.cuda.is_bf16_supported(including_emulation=False)
    return checkpoint if is_fast else torch.float32


def locate_model(path_or_hub_id: str, **kwargs: Any) -> str:
    """Find what transformers loads for a model: its folder, if it is on this machine; else the hub id.

    A GGUF file is converted when it is used for the first time, see `convert_gguf`; `kwargs` are for transformers.

    Raises:
        InputError: a folder that holds no model, a GGUF file that cannot be used, a known model that was not fetched, a slip
            in its name, or a hub id of no model, or where the hub cannot be reached.
        UnsupportedModelError: a GGUF file of an architecture that cannot be blended.
    """
    name = str(path_or_hub_id)
    if is_gguf(name):
        return str(convert_gguf(Path(name)))
    if Path(name, kwargs.get("subfolder", ""), "config.json").is_file():
        return name
    if known := KNOWN_MODELS.get(name):
        if not known.is_fetched:
            raise InputError(f"the model {name!r} is not on this machine; fetch it with `cacheblend model get {name}`")
        return str(known.folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir():
        files = sorted(Path(name).glob("*.gguf")) if Path(name).is_dir() else []
        remedy = f"name the GGUF file itself, such as {files[0]}" if files else "give a directory, a GGUF file or a hub id"
        raise InputError(f"no model at {name!r}: it is not a model directory, as it has no config.json; {remedy}")
    if "/" not in name:
        find_model(name)  # refuses it: the hub's ids have an owner
    _check_hub(name, kwargs)
    return name


def _check_hub(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse a hub id by one look, unless it is cached: transformers would look for half a minute without a network."""
    files = [str(PurePosixPath(kwargs.get("subfolder", ""), file)) for file in ("config.json", "tokenizer_config.json")]
    where = _options(kwargs, "revision", "cache_dir")
    try:
        if any(isinstance(try_to_load_from_cache(name, file, **where), str) for file in files) or repo_exists(name):
            return
        why = "the hub has none of this name, or none that the login here may see"
    except Exception as error:  # of the HTTP library, whichever that is
        why = f"the hub cannot be asked ({error})"
    raise _no_model(name, why)


def _no_model(name: str, why: object) -> InputError:
    others = f"give a model directory, a GGUF file, another hub id, or a known name ({', '.join(KNOWN_MODELS)})"
    return InputError(f"no model at {name!r}: {why}; {others}")


def load_model(
    path_or_hub_id: str, device: str | torch.device, dtype: DTypeOption, **kwargs: Any
) -> tuple[transformers.PreTrainedModel, str]:
    """The causal LM in evaluation mode, and its fingerprint. Never runs code that comes with a model.

    See `locate_model` for the name, and `choose_dtype` for "auto"; `kwargs` are for transformers.

    Raises:
        InputError: no such dtype, no model there, or its files cannot be read.
        UnsupportedModelError: transformers has no causal LM for it.
    """
    name = locate_model(path_or_hub_id, **kwargs)
    try:
        dtype = _resolve_dtype(dtype, name, device, kwargs)
        options = {**kwargs, **NO_CODE, "output_loading_info": True, "use_safetensors": True}
        model, loaded = class_for(name, kwargs).from_pretrained(name, dtype=dtype, **options)
        if drops_softcap(model):
            model.set_attn_implementation("eager")
    except (ValueError, KeyError, ImportError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(f"{name!r} needs Python code of its own, which is never run; use another") from error
        if "Unrecognized" in str(error) or "model type" in str(error):
            raise UnsupportedModelError(f"transformers knows no causal LM for {name!r}: {error}") from error
        raise InputError(f"the model {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    except SafetensorError as error:
        raise InputError(f"the weights of {name!r} are damaged ({error}); fetch or save them again") from error
    except OSError as error:
        if unread := next((file for file in weight_files(Path(name)) if file.exists() and not os.access(file, os.R_OK)), None):
            raise InputError(f"{unread} cannot be read by this user; change its mode or owner") from error
        raise _no_model(name, str(error).partition("\n")[0]) from error
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
        raise InputError(f"the weights of {name!r} have other shapes than its config says; fetch or save both again") from error
    if missing := sorted(loaded["missing_keys"]):
        raise InputError(
            f"the files of {name!r} lack {len(missing)} weights that its config asks for, such as {missing[0]}; "
            "fetch or save them again"
        )
    if "device_map" not in kwargs and "quantization_config" not in kwargs:
        model.to(device)
    if dtype is torch.float32 and not getattr(model, "is_quantized", False):
        model.float()  # without a GPU transformers dequantises FP8 weights, and leaves some in bfloat16
    model.eval()
    model.requires_grad_(False)
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(snapshot_download(name, local_files_only=True, **_options(kwargs, "revision", "cache_dir")))
    folder /= kwargs.get("subfolder", "")
    if weight_files(folder) and not {"variant", "gguf_file"} & kwargs.keys():
        return model, fingerprint_directory(folder, model, dtype)
    return model, fingerprint_module(model, dtype)


def load_tokenizer(path_or_hub_id: str, **kwargs: Any) -> Any:
    """The model's tokenizer, or None where the directory has none: transformers would make an empty one for some families.

    Raises:
        InputError, UnsupportedModelError: see `locate_model`; or the tokenizer's files cannot be read.
    """
    name = locate_model(path_or_hub_id, **kwargs)
    folder = Path(name, kwargs.get("subfolder", ""))
    if folder.is_dir() and not has_tokenizer_files(folder):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **_options(kwargs), **NO_CODE)
    except OSError:
        return None
    except Exception as error:  # tokenizers raises no narrower one
        raise InputError(f"the tokenizer of {name!r} cannot be read ({type(error).__name__}: {error})") from error


def read_config(path_or_hub_id: str) -> Any:
    """The config of a model, see `locate_model`, or of its config.json; a GGUF file is not converted for it.

    Raises:
        InputError: no model there, or its config cannot be read.
    """
    name = str(path_or_hub_id)
    options = {"gguf_file": Path(name).name} if is_gguf(name) and read_header(Path(name)) else {}  # refuses what a load does
    found = str(Path(name).parent) if options or Path(name).name == "config.json" else locate_model(name)
    try:
        return transformers.AutoConfig.from_pretrained(found, **options, **NO_CODE)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise InputError(f"the config of the model {name!r} cannot be read: {error}") from error


def count_weights(config: Any) -> tuple[int, str | None]:
    """The number of a model's weights, without memory for them, and the reason why it is served exactly, if it is.

    Raises:
        InputError: transformers makes no causal LM of this config.
    """
    try:
        with torch.device("meta"):
            model = class_for("", {"config": config}).from_config(config)
    except (ValueError, KeyError, ImportError) as error:
        raise InputError(f"transformers makes no causal LM of the config ({type(error).__name__}: {error})") from error
    return sum(weights.numel() for weights in model.parameters()), exact_reason(model)


def kv_geometry(full: Any, device: torch.device, dtype: DTypeOption) -> KVGeometry:
    """Shape and dtype of a model's KV by its config (`read_config`), without its weights."""
    config: Any = full.get_text_config(decoder=True)
    dtype = _resolve_dtype(dtype, "", device, {"config": full})
    looks = getattr(config, "cross_attention_layers", None) or ()  # Mllama's, at images alone
    layers = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0) - len(looks)
    heads = tuple(map(_heads, getattr(config, "per_layer_config", None) or [config] * layers))[:layers]
    if config.model_type == "mimo_v2_flash":  # whose code, and not its config, doubles the KV heads of layers with a window
        kinds = zip(heads, config.layer_types, strict=True)
        heads = tuple((number * (1 + (kind == "sliding_attention")), size) for (number, size), kind in kinds)
    return KVGeometry(layers, *heads[0], dtype, device, heads_of_layers=heads if len(set(heads)) > 1 else ())


def class_for(name: str, kwargs: dict[str, Any]) -> Any:
    """The class of transformers for a model: of causal LMs, or where there is none, of models that see images."""
    config = kwargs.get("config") or transformers.AutoConfig.from_pretrained(name, **_options(kwargs), **NO_CODE)
    from transformers.models.auto import modeling_auto

    is_wrapper = config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    is_causal = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForImageTextToText if is_wrapper and not is_causal else transformers.AutoModelForCausalLM


def _heads(config: Any) -> tuple[int, int]:
    """KV heads and head size that a layer's config names; of latent attention those of the latent, as it is stored."""
    if rank := getattr(config, "kv_lora_rank", None):
        return 1, (int(rank) + int(config.qk_rope_head_dim)) // 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = int(head_dim), int(getattr(config, "v_head_dim", None) or head_dim)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads), sum(sizes) // 2


def _resolve_dtype(dtype: DTypeOption, name: str, device: str | torch.device, kwargs: dict[str, Any]) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        config: Any = kwargs.get("config") or transformers.AutoConfig.from_pretrained(name, **_options(kwargs), **NO_CODE)
        named = config.get_text_config(decoder=True).dtype or config.dtype
        return choose_dtype(named if isinstance(named, torch.dtype) else DTYPES.get(str(named)), device)
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}, or a torch.dtype")
    return DTYPES[dtype]


def _options(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options of transformers that say where a model's files are."""
    return {name: kwargs[name] for name in names or ("revision", "cache_dir", "subfolder") if name in kwargs}
