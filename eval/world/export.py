"""The trained reader as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


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
