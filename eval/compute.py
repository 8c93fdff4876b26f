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
        windows: per layer its sliding window; None where it sees all.
    """

    kv: int
    row: int
    score: int
    head: int
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Those of a decoder; of experts, the ones that a token runs through."""
        config: Any = decoder.config
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads) * decoder.head_dim
        kv = 2 * hidden * decoder.kv_heads * decoder.head_dim
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
        """Of a prompt through the model's own forward."""
        everything = torch.arange(tokens)
        return self.head + sum(self._rows(everything, window) for window in self.windows)

    def fusion(self, fused: FusionResult, selection_rows: Iterable[int] = ()) -> int:
        """Of what brought a prompt's cache about; tokens of exact segments (a cached prefix) cost nothing.

        A layer whose candidates were compared has projected K and V of all of them, and does so again for those that it runs;
        one that projects those alone that it leaves out is counted as if it had.
        The last layer of a fusion runs the last row alone.

        Args:
            fused: the prompt.
            selection_rows: rows of the selector's own pass, layer by layer; taken to be the prompt's last.
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
        """Rows through one layer, each against the keys up to its own place."""
        keys_S = positions_S + 1 if window is None else (positions_S + 1).clamp(max=window)
        return len(positions_S) * self.row + int(keys_S.sum()) * self.score


def compute_share(fused: FusionResult, model: ModelCompute) -> float:
    """Multiply-adds of a fusion over those of full prefill on the same tokens: 1 for full recompute.

    Includes layer 0, projections of candidates and, where `fused.selection_rows` tells its rows by layer, the selector's own
    pass.
    """
    own_pass: Iterable[int] = getattr(fused, "selection_rows", ())
    return model.fusion(fused, own_pass) / model.full_prefill(len(fused.token_ids))
