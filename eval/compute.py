"""Multiply-adds between question and first token, as a share of full prefill's.

Matrix products and attention scores are counted; norms, rotations, deviations and the loading of KV are not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from cacheblend.blend import FusionResult, LayerReport
from cacheblend.blend.anatomy import LayerAnatomy
from cacheblend.blend.attention import first_seen
from cacheblend.blend.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCompute:
    """Multiply-adds of one layer's parts.

    Args:
        kv: projecting one row's K and V.
        row: one row's matrix products; of a mixture those of the experts that one token runs through.
        score: one row's attention to one key: the score, and the value's weighted sum.
        window: the layer's sliding window; None where it sees every key.
    """

    kv: int
    row: int
    score: int
    window: int | None

    @classmethod
    def of(cls, layer: nn.Module, anatomy: LayerAnatomy, window: int | None, config: Any) -> Self:
        """Count a layer's."""
        row = 0
        for weight in layer.parameters():
            if weight.ndim == 3:  # of experts
                row += weight[0].numel() * min(int(getattr(config, "num_experts_per_tok", 0) or len(weight)), len(weight))
            elif weight.ndim == 2:
                row += weight.numel()
        kv = int(config.hidden_size) * anatomy.key_heads * sum(anatomy.sizes)
        return cls(kv=kv, row=row, score=2 * anatomy.query_heads * anatomy.query_size, window=window)

    def rows(self, positions_S: torch.Tensor) -> int:
        """Count rows through the layer, each against the keys that it sees."""
        first_S = 0 if self.window is None else first_seen(positions_S, self.window).clamp_min(0)
        return len(positions_S) * self.row + int((positions_S + 1 - first_S).sum()) * self.score


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCompute:
    """Multiply-adds of a model's parts.

    Args:
        layers: those that keep KV.
        shared: those that read an earlier layer's.
        head: logits of one row.
    """

    layers: tuple[LayerCompute, ...]
    shared: tuple[LayerCompute, ...]
    head: int

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Count a decoder's."""
        config: Any = decoder.config
        every = tuple(
            LayerCompute.of(layer, anatomy, decoder.windows[anatomy.source], config)
            for layer, anatomy in zip(decoder.layers, decoder.anatomy, strict=True)
        )
        kept = decoder.geometry.layers
        return cls(layers=every[:kept], shared=every[kept:], head=int(config.hidden_size) * int(config.vocab_size))

    def full_prefill(self, tokens: int) -> int:
        """Count a prompt's prefill through the model's own forward."""
        return self.head + sum(layer.rows(torch.arange(tokens)) for layer in (*self.layers, *self.shared))

    def fusion(self, fused: FusionResult, selection: Iterable[LayerReport] = ()) -> int:
        """Count the work that made a prompt's cache; tokens of exact segments (a cached prefix) cost nothing.

        A layer that compares candidates projects K and V of all candidates, and again of the rows that it runs. The last
        layer that keeps KV, and those after it, run only the last row of a fusion.

        Args:
            fused: the prompt.
            selection: layers and rows of what ran before; they are counted as the prompt's last rows.
        """
        tokens, last = len(fused.token_ids), len(self.layers) - 1
        total, is_fusion = self.head, bool(fused.layers)
        for at, (layer, ran, fresh) in enumerate(zip(self.layers, fused.recomputed, fused.projected, strict=True)):
            ends_early = is_fusion and 0 < at == last
            total += layer.rows(ran[-1:] if ends_early else ran)
            if ends_early or len(fresh) > len(ran):
                total += len(fresh) * layer.kv
        end_S = fused.recomputed[-1][-1:] if is_fusion else fused.recomputed[-1]
        total += sum(layer.rows(end_S) for layer in self.shared)
        before = ((self.layers[report.layer], torch.arange(tokens - report.recomputed, tokens)) for report in selection)
        return total + sum(layer.rows(rows) for layer, rows in before)


def compute_share(fused: FusionResult, model: ModelCompute) -> float:
    """Return a fusion's multiply-adds over those of a full prefill of its tokens: 1 for full recompute.

    Layer 0, projections of candidates and what ran before (`fused.selection`) are included.
    """
    return model.fusion(fused, fused.selection) / model.full_prefill(len(fused.token_ids))
