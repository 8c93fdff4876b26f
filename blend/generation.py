"""Generation after a blended prompt: token by token for the sequences of a batch.

In a decoding step each sequence is one row: projections and MLP run for all sequences at once, which reads the weights once;
attention runs for each sequence over its own keys. So nothing is padded or masked, and a sequence joins or leaves between two
steps without a copy of another's KV.

On a CPU one call of `decode_attention.c` serves all sequences of a layer, wherever their KV lies, at the speed at which memory
is read. The file is compiled at its first use on a machine, for the model's shape, where there is a C compiler; without one
PyTorch's attention is called for each sequence.

Shapes: R sequences, Q query heads, H KV heads, G = Q / H, N tokens of the prompt, K keys that a sequence sees, C room for keys,
D head size, V vocabulary.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.store import LayerPair

from .attention import HeadRows, attention_weights, first_seen
from .compiled_file import function, load_or_warn
from .interfaces import GROWTH_TOKENS, KVGeometry, empty_layer
from .layer_passes import CachePass, scores_of
from .prompt import FusionResult

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

SOURCE = Path(__file__).with_name("decode_attention.c")
MAX_VECTORS = 256  # of 16 numbers each, for a KV head's queries: more do not fit the registers


class SequenceLayerKV:
    """One layer of a sequence's KV, which sees the last `window` positions, or all if that is None.

    `memory_21HCD` is a buffer that begins with these keys and values and has free room after them, which the first sequence
    that decodes after a prompt fills; None to copy them. `start` is the first one's position.
    """

    def __init__(
        self, k_HKD: Tensor, v_HKD: Tensor, window: int | None, memory_21HCD: Tensor | None = None, start: int = 0
    ) -> None:
        self._window, self._start = window, start
        if memory_21HCD is None:
            self._move(k_HKD, v_HKD)
        else:
            self._hold((memory_21HCD[0, 0], memory_21HCD[1, 0]), k_HKD.shape[1])

    def append(self, k_H1D: Tensor, v_H1D: Tensor) -> None:
        """Add the next position."""
        self.begin_append()
        for x_HCD, x_H1D in zip(self._kv, (k_H1D, v_H1D), strict=True):
            x_HCD[:, self._used - 1 : self._used] = x_H1D

    def begin_append(self) -> tuple[int, int, int, int, int]:
        """Count the next position, which the caller writes; returns the C file's `Sequence` as five numbers."""
        if self._used == self._kv[0].shape[1]:
            held = min(self._used, self._window or self._used)
            self._start += self._used - held
            self._move(*self.last(held))
        self._used += 1
        return (*self._at, self._first, self._used - 1)

    def visible(self) -> LayerPair:
        """Keys and values (H, K, D) that the last position sees."""
        return self.last(self._used - self._first)

    def last(self, tokens: int) -> LayerPair:
        """Keys and values (H, tokens, D) of the last positions; views that the next append may invalidate."""
        k_HCD, v_HCD = self._kv
        return k_HCD[:, self._used - tokens : self._used], v_HCD[:, self._used - tokens : self._used]

    @property
    def _first(self) -> int:
        seen = 0 if self._window is None else first_seen(self._start + self._used - 1, self._window)
        return max(0, int(seen) - self._start)

    def _move(self, k_HKD: Tensor, v_HKD: Tensor) -> None:
        used, kv = k_HKD.shape[1], list[Tensor]()
        for x_HKD in (k_HKD, v_HKD):
            heads, _, size = x_HKD.shape
            shape = (heads, used + GROWTH_TOKENS, size)
            kv.append(empty_layer(shape, x_HKD.dtype, x_HKD.device))
            kv[-1][:, :used] = x_HKD
        self._hold(kv, used)

    def _hold(self, kv: Sequence[Tensor], used: int) -> None:
        """Keys and values (H, C, D), whose heads may be of different sizes where no kernel reads them."""
        self._kv, self._used = (kv[0], kv[1]), used
        self._at = (kv[0].data_ptr(), kv[1].data_ptr(), kv[0].stride(0))


class SequenceKV:
    """One sequence's KV, with room to grow: in the prompt's buffers, or in a copy if another sequence uses that room.

    The prompt's cache is not changed. `windows` are those of `ModelRunner`; a copy has room for `GROWTH_TOKENS` more.
    """

    def __init__(self, fused: FusionResult, windows: Sequence[int | None]) -> None:
        self.tokens, self.token_ids = int(fused.cache.get_seq_length()), list(fused.token_ids)
        every: list[Any] = fused.cache.layers
        layers = [layer for layer in every if layer.keys is not None]  # others keep none
        memory: list[Tensor | None] = [None] * len(layers)
        if self.tokens == len(fused.token_ids):  # else tokens were generated already, and the cache is in other memory
            memory = fused.take_memory() or memory
        self.layers = [
            SequenceLayerKV(layer.keys[0], layer.values[0], window, memory_21HCD, self.tokens - layer.keys.shape[2])
            for layer, window, memory_21HCD in zip(layers, windows, memory, strict=True)
        ]


class DecodePass(CachePass):
    """One layer's pass over the last token of every sequence; without a kernel by PyTorch's attention."""

    def __init__(self, layers: Sequence[SequenceLayerKV], kernel: DecodeKernel | None = None) -> None:
        self._layers, self._kernel = layers, kernel

    def update(self, k_1HRD: Tensor, v_1HRD: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Append each sequence's key and value to its own KV; with a kernel `attend` does."""
        if self._kernel is None:
            for row, kv in enumerate(self._layers):
                kv.append(k_1HRD[0, :, row : row + 1], v_1HRD[0, :, row : row + 1])
        return k_1HRD, v_1HRD

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        """Attention output (1, R, Q, D), each row over its own sequence's keys."""
        scores = scores_of(q, kw)
        if self._kernel is not None:
            return self._kernel.attend(q, k, v, self._layers, **scores)
        rows = [_attend_one(q[0, :, row], *kv.visible(), **scores) for row, kv in enumerate(self._layers)]
        return torch.stack(rows)[None]

    def __getitem__(self, _: object) -> LayerPair:
        """KV that an earlier layer keeps for this one: attention reads each sequence's own."""
        return torch.empty(0), torch.empty(0)


class OneSequencePass(CachePass):
    """A layer's pass over the last token of one sequence, whose attention expands what is cached."""

    def __init__(self, kv: SequenceLayerKV) -> None:
        self._kv = kv

    def update(self, k_1H1D: Tensor, v_1H1D: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Append the pair; returns all that the token sees."""
        self._kv.append(k_1H1D[0], v_1H1D[0])
        k_HKD, v_HKD = self._kv.visible()
        return k_HKD[None], v_HKD[None]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kw: Any) -> Tensor:
        """Attention output (1, 1, Q, E)."""
        return _attend_one(q[0, :, 0], k[0], v[0], **scores_of(q, kw))[None, None]


def _attend_one(
    q_QD: Tensor, k_HKD: Tensor, v_HKD: Tensor, scaling: float, softcap: float | None = None, sinks_Q: Tensor | None = None
) -> Tensor:
    """Output (Q, D) of one row that sees all keys given."""
    q_HGD = q_QD.unflatten(0, (k_HKD.shape[0], -1))  # the query heads of one KV head are rows over the same keys
    if softcap is None and sinks_Q is None:
        # With a batch dimension PyTorch runs its flash kernel, which is four times as fast on a CPU.
        return scaled_dot_product_attention(q_HGD[None], k_HKD[None], v_HKD[None], scale=scaling)[0].flatten(0, 1)
    return torch.matmul(attention_weights(q_HGD, k_HKD, None, scaling, softcap, sinks_Q), v_HKD).flatten(0, 1)


class DecodeKernel:
    """The compiled `decode_attention.c`, for one number of query heads to a KV head, head size and dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = function(library, "decode_attention", "ppppiiffpip", fails=True)

    def attend(
        self,
        q_1QRD: Tensor,
        k_1HRD: Tensor,
        v_1HRD: Tensor,
        layers: Sequence[SequenceLayerKV],
        scaling: float,
        softcap: float | None,
        sinks_Q: Tensor | None = None,
    ) -> Tensor:
        """Append each sequence's key and value; output (1, R, Q, D) of its query."""
        _, heads, count, size = q_1QRD.shape
        words: list[int] = []
        for kv in layers:
            words += kv.begin_append()
        fresh = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_1QRD, k_1HRD, v_1HRD)]
        out_1RQD = q_1QRD.new_empty(1, count, heads, size)
        sinks_Q = None if sinks_Q is None else sinks_Q.float().contiguous()
        failed = self._call(
            *(ctypes.byref(HeadRows.of(x)) for x in fresh),
            (ctypes.c_int64 * len(words))(*words),
            count,
            k_1HRD.shape[1],
            scaling,
            softcap or 0.0,
            None if sinks_Q is None else sinks_Q.data_ptr(),
            torch.get_num_threads(),
            out_1RQD.data_ptr(),
        )
        if failed:
            raise MemoryError("the system has no memory left for a decoding step's attention weights")
        return out_1RQD


def decode_kernel(geometry: KVGeometry, query_heads: int, layer: int = 0) -> DecodeKernel | None:
    """The kernel for a layer's shape, compiled at its first use; None if PyTorch's attention runs instead."""
    kv_heads, head_dim = geometry.heads(layer)
    groups = query_heads // kv_heads
    is_served = geometry.device.type == "cpu" and geometry.dtype in (torch.float32, torch.bfloat16) and head_dim % 4 == 0
    return _load(groups, head_dim, geometry.dtype) if is_served and groups * head_dim <= 16 * MAX_VECTORS else None


@functools.cache
def _load(groups: int, head_size: int, dtype: torch.dtype) -> DecodeKernel | None:
    shape = [f"-DGROUPS={groups}", f"-DHEAD_SIZE={head_size}", *(["-DBFLOAT16"] if dtype == torch.bfloat16 else [])]
    return load_or_warn(SOURCE, shape, DecodeKernel, "PyTorch's slower attention decodes")


class NextToken:
    """Draws a sequence's tokens with the model's own generation config: its processors, sampling and stopping.

    Args:
        model: the model.
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
        self._max_new_tokens = max_new_tokens
        self._ids_1N = torch.tensor([[*prompt_ids]], device=model.device)  # without the last token; the processors read them
        self._random = torch.Generator(device=model.device)
        if seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(seed)
        self.token_ids: list[int] = []

    def draw(self, logits_V: Tensor) -> int:
        """The next token after float32 logits (V,); it is added to `token_ids`."""
        scores_1V = logits_V[None]
        if self._processors:
            last_1N = self._ids_1N.new_tensor([self.token_ids[-1:]])
            self._ids_1N = torch.cat((self._ids_1N, last_1N), dim=1)
            scores_1V = self._processors(self._ids_1N, scores_1V.clone())
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


def branch_cache(cache: DynamicCache) -> DynamicCache:
    """A cache that begins with this one's keys and values; what is appended to it never shows in the original.

    Those are not copied: the layers of a `DynamicCache` replace them when they grow. States are: they are written in place.
    """
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return copy.deepcopy(cache, {id(x): x for pair in pairs for x in pair if x is not None})
