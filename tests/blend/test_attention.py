"""Blocked attention of chosen rows, against a dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend.blend import attention
from cacheblend.blend.attention import Rows, attend


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    keys = torch.arange(k.shape[2])
    visible = keys <= rows[:, None]
    if window is not None:
        visible &= keys > rows[:, None] - window
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2)


@given(
    data=st.data(),
    keys=st.integers(1, 60),
    window=st.none() | st.integers(1, 70),
    softcap=st.none() | st.just(2.0),
    block=st.integers(1, 9),
    run=st.integers(1, 9),
    gap=st.integers(1, 20),
    kept=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150, deadline=None)
def test_blocks_equal_the_dense_mask(
    data: st.DataObject,
    keys: int,
    window: int | None,
    softcap: float | None,
    block: int,
    run: int,
    gap: int,
    kept: bool,
    dtype: torch.dtype,
) -> None:
    """Any rows, window, soft-capping, block size and cuts between blocks give what one dense exact mask gives.

    So does the next layer of the same rows, whose window may be another, with the masks kept or made anew. In bfloat16 what is
    rounded on the way (scores and weights, 8 bits each) shows.
    """
    scattered = st.sets(st.integers(0, keys - 1), min_size=1)
    to_the_end = st.integers(0, keys // 4).map(lambda first: set(range(first, keys)))
    rows = torch.tensor(sorted(data.draw(scattered | to_the_end)))
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, heads, n, 8, generator=generator).to(dtype) for heads, n in ((4, len(rows)), (2, keys), (2, keys))
    )
    atol = 1e-5 if dtype == torch.float32 else 5e-2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_ROWS, "cpu", block)
        patch.setattr(attention, "LONG_RUN", run)
        patch.setattr(attention, "LONG_GAP", gap)
        patch.setattr(attention, "MAX_CACHED_MASK_BYTES", 2**20 if kept else 0)
        same_rows = Rows.of(rows, torch.device("cpu"))
        for seen in (window, None, window):
            mine = attend(q, k, v, same_rows, scaling=0.3, window=seen, softcap=softcap)
            exact = dense(q.float(), k.float(), v.float(), rows, seen, softcap)
            assert mine.dtype == dtype
            assert torch.allclose(mine.float(), exact, atol=atol)


def test_keys_behind_the_last_row_are_not_read() -> None:
    """Keys that no row of a block can see may hold anything, NaN included."""
    rows = torch.tensor([3, 5, 11, 12])
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.nan
    assert torch.isfinite(attend(q, k, v, Rows.of(rows, torch.device("cpu")), scaling=1.0)).all()


def test_blocks_end_at_long_runs_and_gaps() -> None:
    """A missing chunk's rows stand in blocks of their own, larger ones; a few lone rows far ahead do not share one."""
    rows = torch.cat([torch.arange(0, 90, 3), torch.arange(100, 612), torch.arange(620, 700, 4), torch.arange(2000, 2010)])
    blocks = [block.positions_S for block in Rows.of(rows, torch.device("cpu")).blocks()]
    assert torch.equal(torch.cat(blocks), rows)
    assert [(int(block[0]), len(block)) for block in blocks] == [(0, 30), (100, 256), (356, 256), (620, 20), (2000, 10)]
