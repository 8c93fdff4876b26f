"""How far a token's stored KV is from its fresh KV: the KV deviation (paper §4.1)."""

from __future__ import annotations

import torch


def kv_deviation(
    fresh_k_1HCD: torch.Tensor, fresh_v_1HCD: torch.Tensor, stored_k_1HCD: torch.Tensor, stored_v_1HCD: torch.Tensor
) -> torch.Tensor:
    """Squared difference of keys plus squared difference of values, a token: float32 (C,).

    Keys are compared rotated to the same positions. A rotation keeps distances, so this is the distance before it, times the
    square of the rope's attention scaling where there is one (yarn) and on the rotated part alone where that is a part: the
    difference that attention sees. Summed over KV heads H and head size D in float32.
    """
    k_C = (fresh_k_1HCD.float() - stored_k_1HCD.float()).square().sum(dim=(0, 1, 3))
    return k_C + (fresh_v_1HCD.float() - stored_v_1HCD.float()).square().sum(dim=(0, 1, 3))
