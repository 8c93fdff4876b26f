"""What a fusion gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """One layer of a fusion, as it finished.

    Args:
        layer: its index.
        recomputed: how many rows went through attention and MLP.
        wait_s: seconds that the fusor waited for the layer's stored KV, or copied it from RAM.
        compute_s: seconds of its own work, on the host's clock (a GPU may still be at it).

    """

    layer: int
    recomputed: int
    wait_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, eq=False)
class FusionResult:
    """The KV cache of a whole prompt and the logits behind it. N tokens, L layers, V vocabulary.

    Args:
        logits: float32 (V,), of the token after the prompt.
        cache: `DynamicCache` of the prompt; sliding layers hold what Hugging Face's hold.
        token_ids: the N token ids.
        recomputed: per layer, a sorted LongTensor of the absolute positions that went through attention and MLP.
        projected: per layer, the positions whose K and V are fresh in `cache`; contains `recomputed`.
        deviation: float32 (N,), the KV deviation (paper §4.1) of each reusable token that was a candidate at the first layer
            that measured it; 0 elsewhere.
        reusable_tokens: how many tokens the ratio counts; `exact_tokens` and fresh ones apart.
        exact_tokens: how many tokens stand in exact segments.
        layers: a report a layer.
        memory: per layer that of the keys and values in `cache`, (2, 1, H, C, D) with room behind the prompt for one sequence
            to grow; None where `cache` has a copy, no items where there is no room. See `take_memory`.
        selection: a report a layer of the pass that the selection took, before the first of `layers`; empty without one.

    """

    logits: torch.Tensor
    cache: DynamicCache
    token_ids: tuple[int, ...]
    recomputed: tuple[torch.Tensor, ...]
    projected: tuple[torch.Tensor, ...]
    deviation: torch.Tensor
    reusable_tokens: int
    exact_tokens: int
    layers: tuple[LayerReport, ...] = ()
    memory: list[torch.Tensor | None] = field(default_factory=list, repr=False)
    selection: tuple[LayerReport, ...] = ()

    def take_memory(self) -> list[torch.Tensor | None]:
        """`memory`, for the first who asks; nothing for others: two sequences behind one prompt need room of their own.

        To be asked by one thread at a time.
        """
        taken = self.memory[:]
        self.memory.clear()
        return taken

    @property
    def wait_s(self) -> float:
        """Seconds that the fusion waited for stored KV, or copied it from RAM."""
        return sum(report.wait_s for report in (*self.selection, *self.layers))

    @property
    def selection_rows(self) -> tuple[int, ...]:
        """Rows that the selection's own pass ran, a layer each; empty without one."""
        return tuple(report.recomputed for report in self.selection)

    @property
    def recomputed_ratio(self) -> float:
        """Share of the reusable tokens recomputed, in the mean over layers 1 and up; 0 where none is reusable."""
        fresh = len(self.token_ids) - self.exact_tokens - self.reusable_tokens
        later = self.recomputed[1:]
        if not self.reusable_tokens or not later:
            return 0.0
        return sum(max(0, len(positions) - fresh) for positions in later) / (len(later) * self.reusable_tokens)
