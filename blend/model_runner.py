"""Model runner: the interface that blending needs of a model, whoever loaded it.

`Decoder` is the runner over a Hugging Face model. An engine that has its own modules and weights (vLLM) implements this
protocol over them, so that blending needs no second copy of the weights; `Fusor.from_runner` blends with it.

Shapes: H KV heads, S rows, N tokens, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from .attention import Rows
    from .layer_passes import SharedPrefix
    from .layer_source import KVGeometry, LayerKV
    from .question_pass import QuestionPass

CosSin = tuple[torch.Tensor, torch.Tensor]


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

    @property
    def geometry(self) -> KVGeometry: ...  # documented by the class, with the four below

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def layer_types(self) -> Sequence[Hashable]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None: ...

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        """Input of layer 0, (1, S, M)."""

    def rotary(self, positions_N: torch.Tensor, hidden_1SM: torch.Tensor) -> Mapping[Hashable, CosSin]:
        """Cosine and sine (1, N, rotary size) of the positions, a pair for each of `layer_types`."""

    def rotate(self, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Keys rotated to their positions."""

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE and values (1, H, S, D) of rows at a layer's input."""

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, layer_kv: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        """Run rows through one layer over `layer_kv`; returns (1, S, M). With `scatter` their KV is written there."""

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        """Run the question's rows through one layer, `question.update` and `question.attend` in the place of its attention."""

    def run_isolated(
        self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Position-free keys and values (1, H, N, D), layer by layer, of sequences that do not see each other."""

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
