"""Generation behind a prompt whose cache and first logits are already there."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .fused import FusedPrompt


def continue_from(model: PreTrainedModel, fused: FusedPrompt, max_new_tokens: int, **kwargs: Any) -> list[int]:
    """The tokens that `model.generate` gives behind the prompt, with its own processors, sampling and stopping.

    `generate` given the prompt beside a full cache would prefill the prompt a second time without a word, so its first forward
    is answered with the logits that are there. `fused.cache` is left as it is.

    Args:
        model: the model that the cache is of.
        fused: the prompt.
        max_new_tokens: at most so many tokens, the first included.
        kwargs: anything else `generate` takes.

    """
    prompt_1N = torch.tensor([fused.token_ids], device=fused.logits.device)
    cache = copy.copy(fused.cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    prefilled: list[CausalLMOutputWithPast] = [
        CausalLMOutputWithPast(logits=fused.logits[None, None], past_key_values=cache),
    ]
    own_forward = model.forward

    @functools.wraps(own_forward)
    def forward(*args: Any, **inputs: Any) -> Any:
        return prefilled.pop() if prefilled else own_forward(*args, **inputs)

    continuation: Any = copy.copy(model)
    continuation.forward = forward  # of this shallow copy alone
    output = continuation.generate(
        prompt_1N,
        attention_mask=torch.ones_like(prompt_1N),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        **kwargs,
    )
    sequence = output if isinstance(output, torch.Tensor) else output.sequences
    return [int(token) for token in sequence[0, len(fused.token_ids) :]]
