"""Generation after a blended prompt: with `model.generate`, and token by token for sequences of a batch.

Shapes: H KV heads, N tokens of the prompt, C room for keys, D head size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .decode_attention import SequenceLayerKV
from .prompt import FusionResult

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class SequenceKV:
    """One sequence's KV, with room to grow: in the prompt's buffers, or in a copy if another sequence uses that room.

    The prompt's cache is not changed.

    Args:
        fused: the blended prompt.
        windows: number of last positions that each layer sees; None for all.
    """

    def __init__(self, fused: FusionResult, windows: Sequence[int | None]) -> None:
        self.tokens = int(fused.cache.get_seq_length())
        layers: list[Any] = fused.cache.layers
        memory: list[torch.Tensor | None] = [None] * len(layers)
        if self.tokens == len(fused.token_ids):  # else tokens were generated already, and the cache is in other memory
            memory = fused.take_memory() or memory
        self.layers = [
            SequenceLayerKV(layer.keys[0], layer.values[0], window, memory_21HCD)
            for layer, window, memory_21HCD in zip(layers, windows, memory, strict=True)
        ]


class NextToken:
    """Draws a sequence's tokens with the model's own generation config: its processors, sampling and stopping.

    Args:
        model: the model that computed the logits.
        prompt_ids: the prompt's token ids; some processors (repetition penalty) read them.
        max_new_tokens: maximum number of tokens.
        seed: seed of the sampling; None draws one.
        kwargs: further arguments of `generate`: `do_sample`, `temperature`, `top_p`, ...
    """

    def __init__(
        self, model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, seed: int | None = None, **kwargs: Any
    ) -> None:
        generator: Any = model
        config, _ = generator._prepare_generation_config(None, max_new_tokens=max_new_tokens, **kwargs)
        if config.min_new_tokens is not None:
            config.min_length = config.min_new_tokens + len(prompt_ids)
        generator._prepare_special_tokens(config, True, device=model.device)
        self._processors = generator._get_logits_processor(config, input_ids_seq_length=len(prompt_ids), device=model.device)
        stop = config._eos_token_tensor
        self._stop_ids = frozenset() if stop is None else frozenset(stop.tolist())
        self._do_sample = bool(config.do_sample)
        self._prompt_ids, self._max_new_tokens = tuple(prompt_ids), max_new_tokens
        self._random = torch.Generator(device=model.device)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self.token_ids: list[int] = []

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token after float32 logits (V,); it is added to `token_ids`."""
        scores_1V = logits_V[None]
        if self._processors:
            ids_1N = torch.tensor([(*self._prompt_ids, *self.token_ids)], device=logits_V.device)
            scores_1V = self._processors(ids_1N, scores_1V.clone())
        if self._do_sample:
            token = int(torch.multinomial(torch.softmax(scores_1V, dim=-1), 1, generator=self._random))
        else:
            token = int(scores_1V.argmax())
        self.token_ids.append(token)
        return token

    @property
    def finish_reason(self) -> str | None:
        """`stop` after an end-of-sequence token, `length` at the maximum number of tokens, else None."""
        if self.token_ids and self.token_ids[-1] in self._stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None


OnToken = Callable[[int, "DynamicCache"], None]


def continue_from(
    model: PreTrainedModel, fused: FusionResult, max_new_tokens: int, on_token: OnToken | None = None, **kwargs: Any
) -> list[int]:
    """Generate tokens after the prompt with `model.generate`, its processors, sampling and stopping.

    With a full cache `generate` would prefill the prompt a second time without a warning. So its first forward returns the
    logits of the blend. `fused.cache` is not changed.

    Args:
        model: the model that the cache belongs to.
        fused: the blended prompt.
        max_new_tokens: maximum number of tokens, the first included.
        on_token: called with (token, cache) after the token's KV is appended; it must not modify the cache.
        kwargs: further arguments of `generate`.

    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    prompt_1N = torch.tensor([fused.token_ids], device=fused.logits.device)
    cache = branch_cache(fused.cache)
    prefilled = [CausalLMOutputWithPast(logits=fused.logits[None, None], past_key_values=cache)]
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
