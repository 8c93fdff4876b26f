"""Model families: the verified ones, the reasons to refuse others, and the fingerprint of a model."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cacheblend.base.errors import UnsupportedModelError
from cacheblend.base.files import file_sha256, make_folder, replacing, user_cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# By the model type of the decoder's config. Of each a tiny random model in the tests must have full prefill's logits at ratio
# 1.0 (`scripts/model_families.py`). Granite 4's (granitemoehybrid) are those without state-space layers.
VERIFIED = frozenset(
    """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx deepseek_v2
    deepseek_v3 diffllama dots1 emu3_text_model ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm4v_text gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder nanochat
    nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_5_vl_text qwen2_moe
    qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905
)


def exact_reason(model: PreTrainedModel) -> str | None:
    """Why a model that can be served is not blended: it is a hybrid; None for others."""
    states = sorted(_kinds_of_state(model))
    if not states or not all(state.startswith("LinearAttention") for state in states):
        return None
    return (
        f"{model.config.get_text_config(decoder=True).model_type} models cannot be blended: they have state-space or "
        "linear-attention layers, whose state is not put together from chunks; every request runs exactly"
    )


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose config tells that it would be run wrong; the message names the reasons.

    Raises:
        UnsupportedModelError: layers attend to the future, or to keys that an indexer chooses.
    """
    config: Any = model.config.get_text_config(decoder=True)
    if reasons := list(_reasons(model, config)):
        raise UnsupportedModelError(f"{config.model_type} models cannot be blended: {'; '.join(reasons)}")


def drops_softcap(model: PreTrainedModel) -> bool:
    """Whether attention runs without the model's soft-capping, as Gemma 2 with sdpa in transformers before 5.21."""
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return capped is not None and str(model.config._attn_implementation) == "sdpa"


def _reasons(model: PreTrainedModel, config: Any) -> Iterator[str]:
    """Each reason to refuse a model before it is run."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder, and only decoders are supported"
        return
    is_causal = getattr(config, "is_causal", True)
    if not is_causal or getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision"):
        yield "its attention is bidirectional"
    if drops_softcap(model):
        yield "its soft-capped attention is not what transformers' sdpa computes; load it with attn_implementation='eager'"
    ropes = (getattr(config, "rope_parameters", None) or {}).values()
    if any(isinstance(rope, dict) and rope.get("rope_type") == "longrope" for rope in ropes):
        yield "kinds of its layers have longropes of their own"
    states = sorted(_kinds_of_state(model))
    if states and exact_reason(model) is None:
        yield f"an indexer chooses the keys that its layers see ({', '.join(states)}), by keys of its own"


def _kinds_of_state(model: PreTrainedModel) -> set[str]:
    """Kinds of state, by transformers' class names, that layers hold between tokens instead of keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    kinds = {type(cache_layer) for cache_layer in DynamicCache(config=model.config).layers}
    # A DummyLayer is one that reads another's KV.
    return {kind.__name__ for kind in kinds} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__, "DummyLayer"}


def rope_border(config: Any) -> int | None:
    """Tokens of a prompt beyond which a longrope turns all of it by its other factors; None for other rotary embeddings."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return int(parameters["original_max_position_embeddings"]) if parameters.get("rope_type") == "longrope" else None


class RotaryOfRows(nn.Module):
    """A longrope by the length of each row's own sequence; transformers' turns all rows as the longest sequence.

    Its frequencies are its own: transformers writes the model's anew in every forward, of any thread.

    Attributes:
        of_thread: `ends_S` is the last position of each row's sequence; None for rows of one sequence.
    """

    of_thread = threading.local()

    def __init__(self, rotary: nn.Module, border: int) -> None:
        super().__init__()
        self._border = border
        self._short, self._long = self._fixed(rotary, 0), self._fixed(rotary, border)

    @staticmethod
    def _fixed(rotary: nn.Module, position: int) -> Any:
        """A copy with the factors of this position."""
        twin: Any = copy.deepcopy(rotary)
        if "long_mscale" in (rope := twin.config.rope_parameters):  # PhiMoE's, which its forward scales by each time
            rope["long_mscale"] = rope["short_mscale"] = rope["long_mscale" if position else "short_mscale"]
        device = twin.inv_freq.device
        twin(torch.zeros(1, device=device), torch.full((1, 1), position, device=device))
        twin.rope_type = "default"
        return twin

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ends_S = getattr(self.of_thread, "ends_S", None)  # unset in a thread that ran no entrance
        is_long_S1 = ((position_ids.max() if ends_S is None else ends_S) >= self._border)[..., None]
        (cos, sin), (short_cos, short_sin) = self._long(x, position_ids), self._short(x, position_ids)
        return torch.where(is_long_S1, cos, short_cos), torch.where(is_long_S1, sin, short_sin)


def turn_rows_alone(tree: nn.Module, border: int) -> None:
    """Put a `RotaryOfRows` in the place of each longrope in a module tree; see `rope_border`."""
    for module in list(tree.modules()):
        for name, child in module.named_children():
            if getattr(child, "rope_type", None) == "longrope":
                module._modules[name] = RotaryOfRows(child, border)


def max_positions_of(config: Any) -> int | None:
    """The model's positions, up to which a `dynamic` rope does not depend on the prompt's length; None for any number."""
    positions = int(getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":  # Qwen's model cards add it, and leave the config's positions as they were
        positions = max(positions, int((rope["factor"] or 0) * rope["original_max_position_embeddings"]))
    return positions if positions > 0 else None


def weight_files(directory: Path) -> list[Path]:
    """The files of a model folder that hold its weights: of transformers' names or an index's, or without them any."""
    shards = "".join(index.read_text(encoding="utf-8") for index in directory.glob("*.safetensors.index.json"))
    named = [file for file in directory.glob("*.safetensors") if "model" in file.name or f'"{file.name}"' in shards]
    return sorted(named or (*directory.glob("*.safetensors"), *directory.glob("*.bin")))


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
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _config_digest(model: nn.Module, dtype: torch.dtype) -> hashlib._Hash:
    config: Any = model.config
    volatile = {"_name_or_path", "transformers_version", "dtype"}
    stable = {name: value for name, value in config.to_dict().items() if name not in volatile}
    return hashlib.sha256(f"{dtype}\n{json.dumps(stable, sort_keys=True, default=str)}\n".encode())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex.

    The user's cache folder holds it by real path, size, inode and times, so that a large file is hashed once; the time of the
    inode's change cannot be set back, as that of the file's modification can.
    """
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    target, known = user_cache_folder() / "fingerprints.json", dict[str, str]()
    with suppress(OSError, ValueError, TypeError):
        known = dict(json.loads(target.read_text()))
    if identity not in known:
        known[identity] = file_sha256(path)
        try:
            make_folder(target.parent)
            with replacing(target) as written:
                written.write(json.dumps(known).encode())
        except OSError as error:
            logger.info("weight digests are not remembered in %s: %s", target, error)
    return str(known[identity])
