"""The trained reader as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from cacheblend.base.errors import InputError


def export_reader(
    network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes model and tokenizer; weights in `dtype`, safetensors, tied embeddings once."""
    shipped = copy.deepcopy(network)
    torch.nn.Module.to(shipped, device="cpu", dtype=dtype)  # transformers wraps .to in a way that mypy cannot follow
    shipped.config._attn_implementation = "sdpa"
    shipped.generation_config.eos_token_id = tokenizer.eos_token_id
    shipped.generation_config.pad_token_id = tokenizer.pad_token_id
    shipped.generation_config.do_sample = False
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_reader(folder: Path) -> LlamaForCausalLM:
    """The network of a folder that `export_reader` wrote, in float32.

    Raises:
        InputError: there is none.
    """
    try:
        network = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no reader ({error}); give a folder that train_reader.py wrote") from error
    if not isinstance(network, LlamaForCausalLM):
        raise InputError(f"{folder} holds a {type(network).__name__}, not a reader")
    return network
