"""Model runner: what blending needs of a model, whoever loaded it.

`Decoder` is the runner over a Hugging Face model. An engine that has its own modules and weights (vLLM) implements the same
protocol over them, so that blending takes no second copy of the weights; `Fusor.from_runner` blends with it.

Shapes: H KV heads, S rows, N tokens, D head size, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from .attention import Rows
    from .layer_passes import QuestionPass, SharedPrefix
    from .layer_source import KVGeometry, LayerKV

CosSin = tuple[torch.Tensor, torch.Tensor]


class ModelRunner(Protocol):
    """A causal LM, run layer by layer on chosen rows of a prompt.

    A hidden state is the runner's own: of it others only pick rows, dimension 1.

    Attributes:
        geometry: the shape of one layer's KV, as this process holds it: of its own KV heads under tensor parallelism.
        windows: a layer's sliding window in tokens; None for full attention.
        layer_types: a layer's kind of rotary embedding: a key of what `rotary` gives.
        vocab_size: token ids are below it.
        max_positions: tokens that a prompt may have; None where nothing bounds it.
    """

    @property
    def geometry(self) -> KVGeometry: ...  # noqa: D102  # see the class, as the four below

    @property
    def windows(self) -> Sequence[int | None]: ...  # noqa: D102

    @property
    def layer_types(self) -> Sequence[Hashable]: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def max_positions(self) -> int | None: ...  # noqa: D102

    def embed(self, token_ids_S: torch.Tensor) -> torch.Tensor:
        """Input of layer 0, (1, S, M)."""

    def rotary(self, positions_N: torch.Tensor, hidden_1SM: torch.Tensor) -> Mapping[Hashable, CosSin]:
        """Cosine and sine (1, N, rotary size) of the positions, a pair for each of `layer_types`."""

    def rotate(self, k_1HSD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """Keys rotated to their positions."""

    def project_kv(self, layer: int, hidden_1SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE and values (1, H, S, D) of rows at a layer's input."""

    def run_rows(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, whole: LayerKV, *, scatter: bool
    ) -> torch.Tensor:
        """Run rows of the prompt through one layer against `whole`; gives (1, S, M). With `scatter` their KV is put into it."""

    def run_question(
        self, layer: int, hidden_1SM: torch.Tensor, rows: Rows, cos_sin_N: CosSin, question: QuestionPass
    ) -> torch.Tensor:
        """Run the question's rows through one layer, `question.update` and `question.attend` in the place of its attention."""

    def run_isolated(
        self, sequences: Sequence[Sequence[int]], shared: SharedPrefix | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Position-free keys and values (1, H, N, D), layer by layer, of sequences none of which sees another."""

    def share(self, prefix_ids: Sequence[int]) -> SharedPrefix | None:
        """The KV of a prefix, for sequences that stand after it; None where the runner computes it with each."""

    def logits(self, hidden_1SM: torch.Tensor) -> torch.Tensor:
        """Float32 logits (V,) of the last row, through the model's final norm and head."""

    def reduce(self, heads_sum_N: torch.Tensor) -> torch.Tensor:
        """A sum over this process's heads made one over all processes' heads, so that all select the same tokens."""

    def empty_cache(self) -> DynamicCache:
        """A cache with the model's layer kinds and nothing in it."""


class LayerSink(Protocol):
    """Takes the layers of a blended prompt as they are finished, from 0 up."""

    def put(self, layer: int, whole: LayerKV) -> None:
        """Take a finished layer: keys rotated, all positions filled. Its memory is not used again by the blend."""
