"""Attention of chosen rows against a whole layer of keys, with the exact mask, in blocks (paper §4.2, figure 5b).

A row at absolute position p sees the keys at positions <= p, and within the layer's window, whatever its row number. Rows
are sorted by position and processed in blocks, each against the keys up to its last position: no attention work for keys
that no row of the block can see, and never a (rows x keys) mask or (rows x keys x heads) scores of the whole layer.

Shapes: Q query heads, H KV heads, G = Q / H, S rows, B rows of a block, N keys, K keys that a block sees, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Measured with 497 scattered rows of 3,104: 16 to 128 rows a block take the same time on two cores, 512 take 1.5 x as long;
# on a GPU larger blocks mean fewer launches.
BLOCK_ROWS = {"cpu": 64}
BLOCK_ROWS_ACCELERATOR = 256


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The sorted absolute positions of the rows that a layer runs, on the CPU and on the model's device."""

    positions_S: torch.Tensor
    on_device_S: torch.Tensor

    @classmethod
    def of(cls, positions_S: torch.Tensor, device: torch.device) -> Rows:
        """Rows at these positions, a sorted LongTensor on the CPU."""
        return cls(positions_S, positions_S.to(device, non_blocking=True))

    def __len__(self) -> int:
        return len(self.positions_S)

    @property
    def is_prefix(self) -> bool:
        """Whether the rows are the positions 0..S-1."""
        return len(self) > 0 and int(self.positions_S[-1]) == len(self) - 1

    def split(self, size: int) -> Iterator[Rows]:
        """Consecutive pieces of at most `size` rows."""
        if len(self) <= size:
            yield self
            return
        for positions_S, on_device_S in zip(self.positions_S.split(size), self.on_device_S.split(size), strict=True):
            yield Rows(positions_S, on_device_S)


def attend(
    q_1QSD: torch.Tensor,
    k_1HND: torch.Tensor,
    v_1HND: torch.Tensor,
    rows: Rows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention output (1, S, Q, D) of the rows, in the queries' dtype.

    Args:
        q_1QSD: rotated queries of the rows.
        k_1HND: rotated keys of the positions 0..N-1; those up to each row's position must be set.
        v_1HND: their values.
        rows: positions of the queries.
        scaling: factor on the scores.
        window: a row sees itself and the `window - 1` positions before it; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for none.

    """
    windowed = window is not None and int(rows.positions_S[-1]) >= window
    if rows.is_prefix and not windowed and softcap is None:
        stop = len(rows)
        # The same call as transformers' sdpa path makes, so that ratio 1.0 takes full prefill's own kernel.
        out_1QSD = scaled_dot_product_attention(
            q_1QSD, k_1HND[:, :, :stop], v_1HND[:, :, :stop], is_causal=stop > 1, scale=scaling, enable_gqa=True
        )
        return out_1QSD.transpose(1, 2).contiguous()
    out_1SQD = q_1QSD.new_empty(1, len(rows), q_1QSD.shape[1], v_1HND.shape[-1])
    done = 0
    for block in rows.split(BLOCK_ROWS.get(q_1QSD.device.type, BLOCK_ROWS_ACCELERATOR)):
        stop = int(block.positions_S[-1]) + 1
        start = max(0, int(block.positions_S[0]) - window + 1) if windowed and window is not None else 0
        keys_K = torch.arange(start, stop, device=q_1QSD.device)
        visible_BK = keys_K <= block.on_device_S[:, None]
        if windowed and window is not None:
            visible_BK &= keys_K > block.on_device_S[:, None] - window
        q_1QBD = q_1QSD[:, :, done : done + len(block)]
        out_1QBD = _attend_block(q_1QBD, k_1HND[:, :, start:stop], v_1HND[:, :, start:stop], visible_BK, scaling, softcap)
        out_1SQD[:, done : done + len(block)] = out_1QBD.transpose(1, 2)
        done += len(block)
    return out_1SQD


def _attend_block(
    q_1QBD: torch.Tensor,
    k_1HKD: torch.Tensor,
    v_1HKD: torch.Tensor,
    visible_BK: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Output (1, Q, B, D). The G query heads of a KV head are laid under each other as rows, so keys are never repeated."""
    _, heads, block_rows, head_dim = q_1QBD.shape
    kv_heads = k_1HKD.shape[1]
    groups = heads // kv_heads
    q_1HXD = q_1QBD.reshape(1, kv_heads, groups * block_rows, head_dim)  # X = G x B
    visible_XK = visible_BK.repeat(groups, 1)
    if softcap is None:
        out_1HXD = scaled_dot_product_attention(q_1HXD, k_1HKD, v_1HKD, attn_mask=visible_XK[None, None], scale=scaling)
    else:
        scores_1HXK = torch.matmul(q_1HXD, k_1HKD.transpose(2, 3)) * scaling
        scores_1HXK = torch.tanh(scores_1HXK / softcap) * softcap
        scores_1HXK = scores_1HXK.masked_fill(~visible_XK, torch.finfo(scores_1HXK.dtype).min)
        weights_1HXK = torch.softmax(scores_1HXK, dim=-1, dtype=torch.float32).to(q_1QBD.dtype)
        out_1HXD = torch.matmul(weights_1HXK, v_1HKD)
    return out_1HXD.reshape(1, heads, block_rows, v_1HKD.shape[-1])
