"""Generation after a blended prompt: as `model.generate` does, and the next token of several sequences in one pass.

In a pass the sequences stand where a prompt's rows would: projections and MLP run for all of them at once, which reads the
weights once; attention runs for each over its own keys. So nothing is padded or masked, and a sequence joins or leaves between
two steps without a copy of another's KV.

Shapes: R sequences, Q query heads, H KV heads, G = Q / H, K keys that a sequence sees, C room for keys, D head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend.store import LayerPair

from . import layer_source
from .prompt import FusionResult


class SequenceKV:
    """One sequence's KV, with room to grow: after the prompt's own, or in a copy where another sequence has that room.

    The prompt's cache stays as it is.

    Args:
        fused: the prompt.
        windows: per layer, how many of the last positions it sees; None for all.
    """

    def __init__(self, fused: FusionResult, windows: Sequence[int | None]) -> None:
        self.tokens = int(fused.cache.get_seq_length())
        layers: list[Any] = fused.cache.layers
        memory: list[torch.Tensor | None] = [None] * len(layers)
        if self.tokens == len(fused.token_ids):  # else somebody has generated on, and the cache is in memory of its own
            memory = fused.take_memory() or memory
        self.layers = [
            LayerOfSequence(layer.keys[0], layer.values[0], window, memory_21HCD)
            for layer, window, memory_21HCD in zip(layers, windows, memory, strict=True)
        ]


class LayerOfSequence:
    """One layer of a sequence's KV.

    Args:
        k_HKD: keys.
        v_HKD: values.
        window: how many of the last positions it sees; None for all.
        memory_21HCD: that keys and values stand at the start of, and nobody else's after them; None to copy them.
    """

    def __init__(
        self, k_HKD: torch.Tensor, v_HKD: torch.Tensor, window: int | None, memory_21HCD: torch.Tensor | None = None
    ) -> None:
        self._window = window
        if memory_21HCD is None:
            self._move(k_HKD, v_HKD)
        else:
            self._used = k_HKD.shape[1]
            self._k_HCD, self._v_HCD = memory_21HCD[:, 0]

    def append(self, k_H1D: torch.Tensor, v_H1D: torch.Tensor) -> None:
        """Add the next position."""
        if self._used == self._k_HCD.shape[1]:
            self._move(*self.visible())
        self._k_HCD[:, self._used : self._used + 1] = k_H1D
        self._v_HCD[:, self._used : self._used + 1] = v_H1D
        self._used += 1

    def visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (H, K, D) that the last position sees."""
        start = 0 if self._window is None else max(0, self._used - self._window)
        return self._k_HCD[:, start : self._used], self._v_HCD[:, start : self._used]

    def last(self, tokens: int) -> LayerPair:
        """Keys and values (H, tokens, D) of the last positions, at most those that the next one sees; not to be kept."""
        return self._k_HCD[:, self._used - tokens : self._used], self._v_HCD[:, self._used - tokens : self._used]

    def _move(self, k_HKD: torch.Tensor, v_HKD: torch.Tensor) -> None:
        heads, self._used, size = k_HKD.shape
        room = self._used + layer_source.GROWTH_TOKENS
        kv_X = layer_source.empty_layer((heads * room * (size + v_HKD.shape[-1]),), k_HKD.dtype, k_HKD.device)
        k_X, v_X = kv_X.split([heads * room * size, heads * room * v_HKD.shape[-1]])
        self._k_HCD, self._v_HCD = k_X.view(heads, room, -1), v_X.view(heads, room, -1)
        self._k_HCD[:, : self._used] = k_HKD
        self._v_HCD[:, : self._used] = v_HKD


class DecodePass:
    """One layer's pass of every sequence's last token; stands where `RowsPass` stands for a prompt."""

    def __init__(self, layers: Sequence[LayerOfSequence]) -> None:
        self._layers = layers

    def update(self, k_1HRD: torch.Tensor, v_1HRD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each sequence's key and value to its own KV."""
        for row, kv in enumerate(self._layers):
            kv.append(k_1HRD[0, :, row : row + 1], v_1HRD[0, :, row : row + 1])
        return k_1HRD, v_1HRD

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Attention output (1, R, Q, D), each row over its own sequence's keys."""
        rows = [
            _attend_one(q[0, :, row], *kv.visible(), scaling=kw["scaling"], softcap=kw.get("softcap"))
            for row, kv in enumerate(self._layers)
        ]
        return torch.stack(rows)[None]


def _attend_one(
    q_QD: torch.Tensor, k_HKD: torch.Tensor, v_HKD: torch.Tensor, *, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Output (Q, D) of one row that sees all keys given."""
    q_HGD = q_QD.unflatten(0, (k_HKD.shape[0], -1))  # the query heads of one KV head are rows over the same keys
    if softcap is None:
        # With a batch dimension PyTorch takes its flash kernel: 62 us against 246 without (8/4 heads of 32, 1,024 keys, CPU).
        return scaled_dot_product_attention(q_HGD[None], k_HKD[None], v_HKD[None], scale=scaling)[0].flatten(0, 1)
    scores_HGK = torch.matmul(q_HGD, k_HKD.transpose(1, 2)) * scaling
    scores_HGK = torch.tanh(scores_HGK / softcap) * softcap
    weights_HGK = torch.softmax(scores_HGK, dim=-1, dtype=torch.float32).to(q_QD.dtype)
    return torch.matmul(weights_HGK, v_HKD).flatten(0, 1)


class NextToken:
    """Draws a sequence's tokens with the model's own generation config: its processors, its sampling, its stopping.

    Args:
        model: the model that the logits are of.
        prompt_ids: what stands before the first token; some processors (repetition penalty) look at it.
        max_new_tokens: at most so many tokens.
        seed: of the sampling; None draws one.
        kwargs: what else `generate` takes: `do_sample`, `temperature`, `top_p`, ...
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
        """`stop` after an end-of-sequence token, `length` where no more are allowed, None where it goes on."""
        if self.token_ids and self.token_ids[-1] in self._stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self._max_new_tokens else None


OnToken = Callable[[int, DynamicCache], None]


def continue_from(
    model: PreTrainedModel, fused: FusionResult, max_new_tokens: int, on_token: OnToken | None = None, **kwargs: Any
) -> list[int]:
    """The tokens that `model.generate` gives after the prompt, with its own processors, sampling and stopping.

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
