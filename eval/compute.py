"""Multiply-adds between question and first token, as a share of full prefill's.

Matrix products and attention scores are counted; norms, rotations, deviations and the loading of KV are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from cacheblend.blend import FusionResult
from cacheblend.blend.decoder import Decoder

_UNGATED = ("starcoder2",)  # MLPs of two matrices; all others have three


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCompute:
    """Multiply-adds of a model's parts.

    Args:
        kv: projecting one row's K and V.
        row: one row's Q, K, V and output projections and its MLP.
        score: one row's attention to one key: the score, and the value's weighted sum.
        head: logits of one row.
        windows: the sliding window of each layer; None for a layer that sees every key.
    """

    kv: int
    row: int
    score: int
    head: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Count a decoder's; only the experts that one token runs through count."""
        config: Any = decoder.config
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads) * decoder.geometry.head_dim
        kv = 2 * hidden * decoder.geometry.kv_heads * decoder.geometry.head_dim
        inner = int(config.intermediate_size)
        experts = int(getattr(config, "num_experts_per_tok", 0) or 0)
        if experts:
            shared = int(getattr(config, "shared_expert_intermediate_size", 0) or 0)
            inner = experts * int(getattr(config, "moe_intermediate_size", 0) or inner) + shared
        mlp = (2 if config.model_type in _UNGATED else 3) * hidden * inner
        return cls(
            kv=kv,
            row=kv + 2 * hidden * heads + mlp,
            score=2 * heads,
            head=hidden * int(config.vocab_size),
            windows=tuple(decoder.windows),
        )

    def full_prefill(self, tokens: int) -> int:
        """Count a prompt's prefill through the model's own forward."""
        everything = torch.arange(tokens)
        return self.head + sum(self._rows(everything, window) for window in self.windows)

    def fusion(self, fused: FusionResult, selection_rows: Iterable[int] = ()) -> int:
        """Count the work that made a prompt's cache; tokens of exact segments (a cached prefix) cost nothing.

        A layer that compares candidates projects K and V of all candidates, and again of the rows that it runs. The last
        layer of a fusion runs only the last row.

        Args:
            fused: the prompt.
            selection_rows: number of rows of the selector's own pass in each layer; they are counted as the prompt's last rows.
        """
        tokens, last = len(fused.token_ids), len(fused.recomputed) - 1
        total = self.head
        for layer, (ran, fresh) in enumerate(zip(fused.recomputed, fused.projected, strict=True)):
            ends_early = bool(fused.layers) and 0 < layer == last
            total += self._rows(ran[-1:] if ends_early else ran, self.windows[layer])
            if ends_early or len(fresh) > len(ran):
                total += len(fresh) * self.kv
        for rows, window in zip(selection_rows, self.windows, strict=False):
            total += self._rows(torch.arange(tokens - rows, tokens), window)
        return total

    def _rows(self, positions_S: torch.Tensor, window: int | None) -> int:
        """Count rows through one layer, each against the keys up to its own position."""
        keys_S = positions_S + 1 if window is None else (positions_S + 1).clamp(max=window)
        return len(positions_S) * self.row + int(keys_S.sum()) * self.score


def compute_share(fused: FusionResult, model: ModelCompute) -> float:
    """Return a fusion's multiply-adds over those of a full prefill of its tokens: 1 for full recompute.

    Layer 0, projections of candidates and the rows of the selector's own pass (`fused.selection_rows`) are included.
    """
    own_pass: Iterable[int] = getattr(fused, "selection_rows", ())
    return model.fusion(fused, own_pass) / model.full_prefill(len(fused.token_ids))
