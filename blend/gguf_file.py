"""GGUF files: which of them can be blended, and their conversion into a model folder that loads fast.

A GGUF file holds quantised weights, their architecture, and usually a tokenizer. Transformers needs half a minute to read one
of 135 M parameters. So a file is converted once, into a folder of the user's cache that is named by its SHA-256; later loads
take the folder. Its weights have the file's dtype, or bfloat16 if they are quantised: no coarser than the blocks that they come
from, and half of float32's bytes.
"""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import pre_tokenizers

from cacheblend.base.errors import InputError, StoreError, UnsupportedModelError, needs_extra
from cacheblend.base.files import sync_folder, user_cache_folder
from cacheblend.base.threads import Note
from cacheblend.store.layout import WriteLock

from .families import file_digest

logger = logging.getLogger(__name__)
logging.getLogger("transformers.quantizers.quantizer_gguf").setLevel(logging.ERROR)  # it advises float32 for packed weights

# llama.cpp's names of the verified families that transformers reads from GGUF; each goes there and back in the tests.
ARCHITECTURES = ("gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3")
ORIGIN = "origin.json"  # written last
WEIGHTS_PER_MINUTE = 250e6  # that one core converts
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
# Vocabularies whose text is split into single digits first, which transformers leaves out.
_DIGITS_APART = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
# Of Llama 3 and Mistral: words that are one token are not merged, and BOS comes first where the header does not say.
_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "tekken")
# Tokens that end a turn or a text, as llama.cpp has them; a header names one, and some models write another.
_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
_FOLDER_ONLY = "use the model's own folder (config.json and safetensors) instead of the GGUF file"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Header of a GGUF file.

    Attributes:
        weights: their number.
        dtype: the dtype to run in: the file's own where it holds plain floats, bfloat16 where it is quantised, or Gemma's
            in float16.
        has_tokenizer: a vocabulary is in the file.
        pre_tokenizer: llama.cpp's name for how text is split before merging; "" where there is none.
        rope_factors: what each frequency of its rope is divided by; empty where it is not scaled.
    """

    weights: int
    dtype: str
    has_tokenizer: bool
    pre_tokenizer: str
    rope_factors: tuple[float, ...]


def is_gguf(name: str) -> bool:
    """Whether a model is named by a GGUF file."""
    return name.lower().endswith(".gguf") and not Path(name).is_dir()


def has_tokenizer_files(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any(file.is_file() for pattern in _TOKENIZER for file in folder.glob(pattern))


def converted_folder(name: str, gguf_sha256: str) -> Path:
    """Folder of a GGUF file's conversion in the user's cache; it may not exist yet."""
    return user_cache_folder() / "models" / f"{name[:80]}-{gguf_sha256[:16]}"


def is_converted(folder: Path) -> bool:
    """Whether a folder holds a finished conversion."""
    return (folder / ORIGIN).is_file()


def add_end_tokens(model: Any, tokenizer: Any) -> None:
    """Have a model end its answers at its tokenizer's end, too; one that was a GGUF file at each that its vocabulary has."""
    if tokenizer is None:
        return
    named, ends = model.generation_config.eos_token_id, {tokenizer.eos_token_id} - {None}
    if is_converted(Path(model.name_or_path)):
        ends |= {token for token, known in tokenizer.added_tokens_decoder.items() if known.special and known.content in _ENDS}
    model.generation_config.eos_token_id = sorted({*ends, *([named] if isinstance(named, int) else named or ())}) or None


def convert_gguf(path: Path) -> Path:
    """The model folder of a GGUF file, converted now unless that was done before.

    Raises:
        InputError: no such file, not a GGUF file, damaged, or without a tokenizer; or the cache folder cannot be written.
        MissingExtraError: a package is missing.
        UnsupportedModelError: see `read_header`.
    """
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}; give a GGUF file, a model directory, a hub id or a known name")
    digest = file_digest(path)
    folder = converted_folder(path.stem, digest)
    if not is_converted(folder):
        header, stage = read_header(path), {"stage": "converting the model"}
        price = conversion_price(header.weights, header.dtype)
        logger.warning("converting %s once into %s: %s", path, folder, price, extra=stage)
        with new_folder(folder) as partial:
            if partial is not None:
                if (free := shutil.disk_usage(partial).free) < header.weights * getattr(torch, header.dtype).itemsize:
                    raise OSError(errno.ENOSPC, f"{price} are needed, and {free / 1e9:.1f} GB are free")
                convert_into(partial, path, {"file": path.name, "gguf_sha256": digest})
    return folder


def conversion_price(weights: int, dtype: str) -> str:
    """Describe the cost of a conversion: disk, memory and time."""
    size_gb, minutes = weights * getattr(torch, dtype).itemsize / 1e9, math.ceil(weights / WEIGHTS_PER_MINUTE)
    return f"{weights / 1e6:,.0f} M weights become {size_gb:.1f} GB on disk and in memory, in about {minutes} min"


@contextmanager
def new_folder(target: Path) -> Iterator[Path | None]:
    """An empty folder that becomes `target` if the block ends well; None where another process made `target` meanwhile.

    One process at a time fills it. The files of a killed one are removed. The new folder appears complete or not at all.

    Raises:
        InputError: the folder above cannot be written, or the disk is full.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = WriteLock(target.with_name(f".{target.name}.lock"))
        with closing(lock), lock:
            if is_converted(target):
                yield None
                return
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir()
                yield partial
                _sync_files(partial)
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
                sync_folder(target.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError, StoreError) as error:
        raise InputError(
            f"the model cannot be stored in {target.parent}: {error}; free space there, make it writable, or set XDG_CACHE_HOME"
        ) from error


def _sync_files(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    sync_folder(folder)


def convert_into(
    folder: Path, path: Path, origin: Mapping[str, object], dtype: str | None = None, on_progress: Note = lambda *_: None
) -> None:
    """Write a GGUF file's model and tokenizer into a folder that transformers loads, with `origin` beside them.

    The tokenizer is the one whose files lie beside the GGUF file, else the one in it. Its weights are stored in `dtype`, left
    out in the header's, in which the model runs; they are dequantised one by one, in a few times the memory of the largest one.

    Raises:
        InputError, UnsupportedModelError: see `read_header`; or the file lacks weights or a tokenizer.
    """
    on_progress("convert", 0, 1)
    header = read_header(path)
    if not header.has_tokenizer and not has_tokenizer_files(path.parent):
        raise InputError(f"{path} holds no tokenizer; put the model's tokenizer.json and tokenizer_config.json beside it")
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    stored = getattr(torch, dtype or header.dtype)
    try:
        with _reported(on_progress):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(path.parent), **source, dtype=stored, output_loading_info=True
            )
    except Exception as error:  # whatever shapes and values that do not fit run into
        raise InputError(f"{path} cannot be read ({type(error).__name__}: {error}); {_FOLDER_ONLY}") from error
    model, report = loaded
    if report["missing_keys"]:
        raise InputError(f"{path} lacks weights ({', '.join(sorted(report['missing_keys'])[:3])}, ...); {_FOLDER_ONLY}")
    # What is left is an ordinary model of plain weights; transformers would save it as a quantised one.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    if header.rope_factors:
        _scale_rope(path, model.config, header.rope_factors)
    model.save_pretrained(str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": header.dtype}, indent=2), encoding="utf-8")
    _tokenizer(path, header, source, model.config.vocab_size).save_pretrained(str(folder))
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2), encoding="utf-8")
    on_progress("convert", 1, 1)


@contextmanager
def _reported(on_progress: Note) -> Iterator[None]:
    """Transformers reports each tensor that it converts to `on_progress`, and shows no bar of its own."""
    from transformers import modeling_gguf_pytorch_utils as loader

    def bar(tensors: Sequence[object], **_: object) -> Iterator[object]:
        for number, tensor in enumerate(tensors):
            on_progress("convert", number, len(tensors))
            yield tensor

    own = vars(loader)["tqdm"]
    vars(loader)["tqdm"] = bar
    try:
        yield
    finally:
        vars(loader)["tqdm"] = own


def read_header(path: Path) -> GGUFHeader:
    """Read a GGUF file's header, and check that the model in it can be blended.

    Raises:
        InputError: not a GGUF file, a damaged one, or a part of one.
        MissingExtraError: a package is missing.
        UnsupportedModelError: an architecture outside `ARCHITECTURES`, or a detail that transformers does not read from GGUF.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise InputError(f"{path} is not a GGUF file: it does not begin with GGUF; give a GGUF file or a model directory")
    reader_class = _bounded_reader()
    try:
        reader = reader_class(path)
        # Long fields are vocabularies, which take seconds to read and are not needed.
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= 16}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture, parts = str(fields.get("general.architecture", "")), int(fields.get("split.count", 1))
        reasons = list(_unread(architecture, fields, set(tensors)))
    except Exception as error:  # numpy, struct and unicode errors of all kinds, by where it was cut
        why = "is of a quantisation that is not read" if "GGMLQuantizationType" in str(error) else "is truncated or damaged"
        raise InputError(f"{path} {why} ({type(error).__name__}: {error}); fetch it again, or as Q4_K_M or Q8_0") from error
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {architecture!r}; from GGUF these can be blended: {', '.join(ARCHITECTURES)}"
        )
    if parts > 1:
        raise InputError(f"{path} is one part of {parts}; join them with llama-gguf-split --merge")
    if reasons:
        raise UnsupportedModelError(f"{path}: {reasons[0]}, which transformers does not read from GGUF; {_FOLDER_ONLY}")
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    in_float16 = kinds <= {"F32", "F16"} and not architecture.startswith("gemma")  # whose activations overflow
    return GGUFHeader(
        weights=sum(int(tensor.n_elements) for tensor in reader.tensors),
        dtype="float32" if kinds <= {"F32"} else "float16" if in_float16 else "bfloat16",
        has_tokenizer="tokenizer.ggml.tokens" in reader.fields,
        pre_tokenizer=str(fields.get("tokenizer.ggml.pre", "")),
        rope_factors=tuple(map(float, tensors["rope_freqs.weight"].data)) if "rope_freqs.weight" in tensors else (),
    )


def _bounded_reader() -> Any:
    """A GGUFReader to which a count beyond the file's end is an error: the reader itself would fill memory."""
    check_packages()
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if len(found := super()._get(offset, dtype, count, override_order)) < count:
                raise ValueError("it promises more than it has")
            return found

    return BoundedReader


def check_packages() -> None:
    """Refuse an installation that cannot read GGUF.

    Raises:
        MissingExtraError: a package is missing.
    """
    with needs_extra("gguf"):
        import accelerate  # type: ignore[import-untyped]  # noqa: F401  # it has no types
        import gguf  # noqa: F401


def _unread(architecture: str, fields: Mapping[str, Any], tensors: Set[str]) -> Iterator[str]:
    """Name what transformers would silently leave out of a model."""
    if int(fields.get(f"{architecture}.expert_count", 0)) > 0:
        yield "it is a mixture of experts"
    factors = {float(fields.get(f"{architecture}.rope.{name}", 1)) for name in ("scaling.factor", "scale_linear")}
    scaling = str(fields.get(f"{architecture}.rope.scaling.type", "none" if factors <= {0, 1} else "linear"))
    if scaling != "none":
        yield f"its rope is scaled ({scaling})"
    if any(name.startswith("rope_factors") for name in tensors):
        yield "its rope is scaled (longrope)"
    if architecture != "qwen2" and any(name.endswith(".bias") for name in tensors):
        yield "its layers have biases"
    if architecture in ("gemma2", "gemma3") and int(fields.get(f"{architecture}.attention.key_length", 256)) != 256:
        yield "its attention is scaled by other than its head size"
    window = fields.get("phi3.attention.sliding_window", fields.get("phi3.context_length") == 4096)  # older files have none
    if architecture == "phi3" and int(window) > 0:
        yield "its attention has a window"


def _scale_rope(path: Path, config: Any, factors: Sequence[float]) -> None:
    """Put the rope scaling of Llama 3 into a config: a GGUF file has its effect on each frequency, not its parameters."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        **config.rope_parameters,
        "rope_type": "llama3",
        "factor": round(max(factors), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * len(factors), 2) / (2 * len(factors)))
    config.rope_parameters = rope
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    if scaled.shape != plain.shape or not torch.allclose(plain / torch.tensor(factors), scaled, rtol=1e-4):
        raise UnsupportedModelError(f"{path}: its rope is scaled, and not as Llama 3's is; {_FOLDER_ONLY}")


def _tokenizer(path: Path, header: GGUFHeader, source: Mapping[str, Any], vocab_size: int) -> Any:
    beside = has_tokenizer_files(path.parent)
    try:
        where = {"trust_remote_code": False} if beside else source
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(path.parent), **where)
    except Exception as error:  # whatever a vocabulary of another kind runs into
        raise InputError(
            f"the tokenizer {'beside' if beside else 'in'} {path} cannot be read ({error}); put the model's tokenizer.json and "
            "tokenizer_config.json beside it"
        ) from error
    size = max(tokenizer.vocab_size, *(1 + (id_ or 0) for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id)))
    if size > vocab_size:  # of other added tokens a text model may lack some
        raise InputError(
            f"the tokenizer of {path} has {size:,} tokens and the model {vocab_size:,}: it is of another model, or misread; "
            "put this model's tokenizer.json and tokenizer_config.json beside the file"
        )
    if not beside and header.pre_tokenizer in _WORDS_FIRST:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if "add_bos_token" not in tokenizer.init_kwargs:
            tokenizer.add_bos_token = True
    if not beside and header.pre_tokenizer in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
