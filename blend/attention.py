"""Attention of chosen rows against a whole layer of keys, with the exact mask, in blocks (paper §4.2, figure 5b).

A row at absolute position p sees the keys at positions <= p, and within the layer's window, whatever its row number. Rows
are sorted by position and processed in blocks, each against the keys up to its last position: no attention work for keys
that no row of the block can see, and never a (rows x keys) mask or (rows x keys x heads) scores of the whole layer.

Shapes: Q query heads, H KV heads, G = Q / H query heads of a KV head, S rows, B rows of a block, N keys, K keys that a block
sees, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# A block's rows all pay for the keys up to its last one: scattered rows are taken few at a time (with 497 of 3,104, 16 to 128 a
# block take the same time on two cores, 512 take 1.5 x as long), neighbours many. On a GPU larger blocks mean fewer launches.
BLOCK_ROWS = {"cpu": 64}
BLOCK_ROWS_ACCELERATOR = 256
BLOCK_ROWS_CONTIGUOUS = 256


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

    def blocks(self) -> Iterator[Rows]:
        """The pieces that attention takes them in."""
        size = BLOCK_ROWS.get(self.on_device_S.device.type, BLOCK_ROWS_ACCELERATOR)
        contiguous = len(self) > 0 and int(self.positions_S[-1] - self.positions_S[0]) == len(self) - 1
        return self.split(max(size, BLOCK_ROWS_CONTIGUOUS) if contiguous else size)


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
    kv_heads = k_1HND.shape[1]
    q_HGSD = q_1QSD[0].unflatten(0, (kv_heads, -1))
    out_1SQD: torch.Tensor = q_HGSD.new_empty(1, len(rows), q_1QSD.shape[1], v_1HND.shape[-1])
    out_HGSD = out_1SQD[0].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    done = 0
    for block in rows.blocks():
        stop = int(block.positions_S[-1]) + 1
        start = max(0, int(block.positions_S[0]) - window + 1) if windowed and window is not None else 0
        bias_BK = _mask(block, start, stop, window if windowed else None, q_1QSD.dtype)
        taken = slice(done, done + len(block))
        out_HGSD[:, :, taken] = _attend_block(
            q_HGSD[:, :, taken], k_1HND[0, :, start:stop], v_1HND[0, :, start:stop], bias_BK, scaling, softcap
        )
        done += len(block)
    return out_1SQD


def _mask(block: Rows, start: int, stop: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores (B, K) of the keys from `start` to `stop`: 0 where a row sees a key, -inf elsewhere.

    Only keys past the block's first position, or behind the last one's window, can be hidden from some row: the rest is not
    compared.
    """
    first, last = int(block.positions_S[0]), int(block.positions_S[-1])
    rows_B1 = block.on_device_S[:, None]
    bias_BK = torch.zeros(len(block), stop - start, dtype=dtype, device=rows_B1.device)
    future_K = torch.arange(first + 1, stop, device=rows_B1.device)
    bias_BK[:, first + 1 - start :].masked_fill_(future_K > rows_B1, -torch.inf)
    if window is not None:
        past_K = torch.arange(start, max(start, last - window + 1), device=rows_B1.device)
        bias_BK[:, : len(past_K)].masked_fill_(past_K <= rows_B1 - window, -torch.inf)
    return bias_BK


def _attend_block(
    q_HGBD: torch.Tensor,
    k_HKD: torch.Tensor,
    v_HKD: torch.Tensor,
    bias_BK: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Output (H, G, B, D). KV heads stand where a batch would and keys are shared by their G query heads without a copy."""
    groups = q_HGBD.shape[1]
    if softcap is None:
        k_HGKD, v_HGKD = (x_HKD[:, None].expand(-1, groups, -1, -1) for x_HKD in (k_HKD, v_HKD))
        return scaled_dot_product_attention(q_HGBD, k_HGKD, v_HGKD, attn_mask=bias_BK[None, None], scale=scaling)
    scores_HGBK = torch.matmul(q_HGBD, k_HKD[:, None].transpose(2, 3)) * scaling
    scores_HGBK = torch.tanh(scores_HGBK / softcap) * softcap + bias_BK
    weights_HGBK = torch.softmax(scores_HGBK, dim=-1, dtype=torch.float32).to(q_HGBD.dtype)
    return torch.matmul(weights_HGBK, v_HKD[:, None])
