"""Interfaces of a blend, and a layer's buffer: the model's runner, the source of stored layers, the sink of finished ones.

`Decoder` is the runner over a Hugging Face model. An engine that has its own modules and weights (vLLM) implements
`ModelRunner` over them, so that blending needs no second copy of the weights; `Fusor.from_runner` blends with it.

Shapes: H KV heads, S rows, N tokens of the prompt, T tokens of a chunk, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from cacheblend.base.memory import HUGE_PAGE_BYTES, BufferPool

if TYPE_CHECKING:
    from transformers import DynamicCache

    from cacheblend.store import LayerPair

    from .attention import Rows
    from .layer_passes import QuestionPass, SharedPrefix
    from .prompt import Prompt

GROWTH_TOKENS = 128  # room after a prompt for generated tokens, which then need no copy of its KV; extended by as many
LAYERS = BufferPool(256 * 2**20, slack=2)  # a prompt of half the length can reuse a buffer
CosSin = tuple[torch.Tensor, torch.Tensor]


def empty_layer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this shape, not initialised."""
    count = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or count < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(LAYERS.empty(count)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape, dtype and device of the layers' keys, and of their values.

    Args:
        layers: layers that keep KV.
        kv_heads: of the first layer, as is `head_dim`.
        heads_of_layers: (KV heads, head size) of each layer; empty if all are like the first.
        shared: for each further layer, which keeps no KV: the layer whose KV it reads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    heads_of_layers: tuple[tuple[int, int], ...] = ()
    shared: tuple[int, ...] = ()

    def heads(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of a layer."""
        return self.heads_of_layers[layer] if self.heads_of_layers else (self.kv_heads, self.head_dim)

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens in one layer, in the mean over layers."""
        numbers = sum(heads * size for heads, size in map(self.heads, range(self.layers)))
        return 2 * numbers * tokens * self.dtype.itemsize // self.layers


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """One layer's keys and values of a prompt, on the model's device, in one tensor, so that a chunk is one copy.

    As a source returns it, cached positions hold stored values (keys not yet rotated, except a `PrefixRun`'s) and the
    others are not initialised. `memory_21HCD` has C > N positions: room after the prompt for generated tokens.
    """

    kv_21HND: torch.Tensor
    memory_21HCD: torch.Tensor

    @classmethod
    def empty(cls, geometry: KVGeometry, tokens: int, layer: int = 0) -> LayerKV:
        """Room for `tokens` tokens of a layer, not initialised."""
        heads, size = geometry.heads(layer)
        shape = (2, 1, heads, tokens + GROWTH_TOKENS, size)
        memory_21HCD = empty_layer(shape, geometry.dtype, geometry.device)
        return cls(memory_21HCD[:, :, :, :tokens], memory_21HCD)

    @property
    def k_1HND(self) -> torch.Tensor:
        return self.kv_21HND[0]

    @property
    def v_1HND(self) -> torch.Tensor:
        return self.kv_21HND[1]

    def put(self, positions_S: torch.Tensor, k_1HSD: torch.Tensor, v_1HSD: torch.Tensor) -> None:
        """Copy keys and values to these positions."""
        self.k_1HND.index_copy_(2, positions_S, k_1HSD)
        self.v_1HND.index_copy_(2, positions_S, v_1HSD)


class ModelRunner(Protocol):
    """A causal LM, run layer by layer on chosen rows of a prompt.

    A hidden state belongs to the runner: its callers only pick rows of it, dimension 1.

    Attributes:
        geometry: the shape of one layer's KV in this process; under tensor parallelism of its own KV heads.
        windows: each layer's sliding window in tokens; None for full attention.
        layer_types: each layer's kind of rotary embedding, a key of the mapping that `rotary` returns.
        vocab_size: every token id is below it.
        max_positions: maximum number of a prompt's tokens; None if there is no maximum.
    """

    geometry: KVGeometry
    windows: list[int | None]
    layer_types: list[Hashable]
    vocab_size: int
    max_positions: int | None

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        """Input of layer 0, (1, S, M)."""

    def rotary(self, positions_N: torch.Tensor) -> Mapping[Hashable, CosSin]:
        """Cosine and sine (1, N, rotary size) of the positions, a pair for each of `layer_types`."""

    def rotate(self, layer: int, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """A layer's stored keys rotated to their positions."""

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE and values (1, H, S, D) of rows at a layer's input."""

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        """Run rows through one layer over `layer_kv`; returns (1, S, M). With `scatter` their KV is written there.

        This is the paper's `prefill_layer` (§6).
        """

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        """Run rows through one layer, `question.update` and `question.attend` in the place of its attention."""

    def run_isolated(self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None) -> Iterator[LayerPair]:
        """Position-free keys and values (1, H, N, D), layer by layer, of sequences that do not see each other.

        Args:
            sequences: token ids of each; N is the number of tokens of all sequences, which are concatenated. Neighbours of
                equal length are fastest.
            shared: prefix that every sequence sees; None for no prefix.
        """

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        """The KV of a prefix, for sequences that follow it; None if the runner computes the prefix with each sequence."""

    def logits(self, hidden_1SM: torch.Tensor) -> torch.Tensor:
        """Float32 logits (V,) of the last row, through the model's final norm and head."""

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        """Sum over the heads of all processes, given the sum over this process's heads; so all select equal tokens."""

    def empty_cache(self) -> DynamicCache:
        """A cache with the model's layer kinds and nothing in it."""


class LayerSink(Protocol):
    """Receives the layers of a blended prompt as they are finished, from 0 up."""

    def put(self, layer: int, layer_kv: LayerKV) -> None:
        """Receive a finished layer: keys rotated, all positions filled. The blend does not use its memory again."""


class LayerSource(Protocol):
    """Loads the stored KV of a prompt's segments, layer by layer, from 0 up."""

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        """Begin to load. Without `reuse_layer_0` layer 0 reads only exact segments: all other tokens run through it."""

    def synchronize(self, layer: int) -> LayerKV:
        """Wait until this layer's KV is on the device, and return it (the paper's `synchronize`, §6)."""


class ResidentLayers:
    """A source for KV in memory, which copies a layer at its `synchronize`."""

    def start(self, prompt: Prompt, geometry: KVGeometry, *, reuse_layer_0: bool) -> None:
        self._prompt, self._geometry, self._reuse_layer_0 = prompt, geometry, reuse_layer_0

    def synchronize(self, layer: int) -> LayerKV:
        layer_kv = LayerKV.empty(self._geometry, len(self._prompt), layer)
        for start, stop, kv in self._prompt.cached(exact_only=layer == 0 and not self._reuse_layer_0):
            kv.copy_layer(layer, layer_kv.kv_21HND[:, 0, :, start:stop])
        return layer_kv
