"""Generation behind a prompt whose cache and first logits are already there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .fused import FusedPrompt

OnToken = Callable[[int, DynamicCache], None]


def continue_from(
    model: PreTrainedModel, fused: FusedPrompt, max_new_tokens: int, on_token: OnToken | None = None, **kwargs: Any
) -> list[int]:
    """The tokens that `model.generate` gives behind the prompt, with its own processors, sampling and stopping.

    `generate` given the prompt beside a full cache would prefill the prompt a second time without a word, so its first forward
    is answered with the logits that are there. `fused.cache` is left as it is.

    Args:
        model: the model that the cache is of.
        fused: the prompt.
        max_new_tokens: at most so many tokens, the first included.
        on_token: told of each generated token whose KV has come to the cache, and of the cache, which it leaves as it is.
        kwargs: anything else `generate` takes.

    """
    prompt_1N = torch.tensor([fused.token_ids], device=fused.logits.device)
    cache = branch_cache(fused.cache)
    prefilled: list[CausalLMOutputWithPast] = [
        CausalLMOutputWithPast(logits=fused.logits[None, None], past_key_values=cache),
    ]
    own_forward = model.forward

    @functools.wraps(own_forward)
    def forward(*args: Any, **inputs: Any) -> Any:
        if prefilled:
            return prefilled.pop()
        output = own_forward(*args, **inputs)
        if on_token is not None:
            on_token(int(inputs["input_ids"][0, -1]), cache)
        return output

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


def branch_cache(cache: DynamicCache) -> DynamicCache:
    """A cache that begins with this one's keys and values; what is appended to it never shows in the original.

    Nothing is copied: the layers of a `DynamicCache` replace their tensors when they grow.
    """
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    return branch
