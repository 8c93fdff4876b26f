"""Attention of chosen rows against all keys of a layer, with the exact mask, in blocks (paper §4.2, figure 5b).

A row at absolute position p sees the keys at positions <= p, and within the layer's window, whatever its row number. Rows
are sorted by position and processed in blocks, each against the keys up to its last position. So no attention is computed for
keys that no row of the block can see, scores of a complete layer (rows x keys x heads) never exist, and no mask is larger than
`MAX_CACHED_MASK_BYTES`.

On a CPU `row_attention.c` computes each row over the keys that it sees, and rotates stored keys: in float32, and in bfloat16
where there is AMX or AVX512-BF16 (docs/adr/020). It is compiled when a model is first loaded on a machine, for its head size
and dtype, where there is a C compiler. Heads whose size is no multiple of 32 are computed in blocks.

Shapes: Q query heads, H KV heads, G = Q / H query heads of a KV head, S rows, B rows of a block, X = B x G, N keys or
positions, K keys that a block sees, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .compiled_file import function, has_feature, load_or_warn
from .interfaces import CosSin

# Rows of a block: each row pays for the keys up to the block's last row, so scattered rows stand in small blocks and neighbours
# in large ones. A run of LONG_RUN neighbours or more, such as a missing chunk, has blocks of its own. On the CPU no block
# reaches over a gap of more than LONG_GAP positions; on a GPU larger blocks mean fewer launches.
BLOCK_ROWS = {"cpu": 64}
BLOCK_ROWS_ACCELERATOR = 256
BLOCK_ROWS_CONTIGUOUS = 256
LONG_RUN = 128
LONG_GAP = 256
# If a run of rows starts within 1/SKIPPED_PART of its length, one causal call from position 0 computes it (docs/adr/005).
SKIPPED_PART = 4
# In 16 bits on a CPU a block's attention is two matrix products, as in transformers' eager path: PyTorch's own kernel has
# 16-bit instructions only where there is AMX, and takes twice as long elsewhere.
HALF = (torch.bfloat16, torch.float16)
# A block's keys end at a multiple of KEYS_MULTIPLE positions, where the prompt is long enough: oneDNN compiles a product for
# each new shape, which doubles its time, and rows of a new prompt end anywhere.
KEYS_MULTIPLE = 64
# Bytes of masks that are cached for the next layer with an equal window; making them again costs a small model 5 % of a layer.
MAX_CACHED_MASK_BYTES = 16 * 2**20
SOURCE = Path(__file__).with_name("row_attention.c")
FEATURES = "amx_bf16", "avx512_bf16"  # either of which bfloat16 needs
HEAD_MULTIPLE, MAX_HEAD_SIZE = 32, 256
ALL_KEYS = 2**62  # a window longer than any prompt
Rotate = Callable[[torch.Tensor, CosSin], torch.Tensor]
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class ChunkWindow(int):
    """The window of chunked attention: a row sees itself and what is before it from a multiple of the window's tokens on."""


def first_seen(positions: Any, window: int) -> Any:
    """The first position that rows at these positions, a number or a LongTensor, see in a window; below 0 for all before."""
    return positions - positions % int(window) if isinstance(window, ChunkWindow) else positions - window + 1


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows that attention processes together, and their keys from `start` to `stop`.

    keys[start:stop] covers every key that any of the rows may see; `bias_BGT` masks the others. It is added to the scores of
    the keys from `start + hidden_from` on: 0 where a row sees a key, -inf elsewhere. Earlier keys are visible to all rows. G
    is 1 where one mask serves all query heads of a KV head.
    """

    rows: slice
    start: int
    stop: int
    bias_BGT: torch.Tensor
    hidden_from: int


def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device; to a GPU through pinned memory, so the host does not wait for the GPU's queue."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The sorted absolute positions of the rows that a layer runs, on the CPU and on the device."""

    positions_S: torch.Tensor
    on_device_S: torch.Tensor
    _masked: dict[object, list[Block]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, positions_S: torch.Tensor, device: torch.device) -> Rows:
        """Rows at these positions, a sorted LongTensor on the CPU."""
        return cls(positions_S, upload(positions_S, device))

    def __len__(self) -> int:
        return len(self.positions_S)

    @property
    def first(self) -> int:
        return int(self.positions_S[0])

    @property
    def is_contiguous(self) -> bool:
        """Whether there are rows, and they are neighbours without a gap."""
        return len(self) > 0 and int(self.positions_S[-1]) - self.first == len(self) - 1

    @property
    def last(self) -> Rows:
        """The last row only."""
        return self._part(len(self) - 1, len(self))

    def split(self, size: int) -> Iterator[Rows]:
        """Consecutive pieces of at most `size` rows."""
        if len(self) <= size:
            yield self  # with its cached masks
            return
        for start in range(0, len(self), size):
            yield self._part(start, start + size)

    def blocks(self) -> Iterator[Rows]:
        """Blocks of about equal size, in order; a remainder is merged into the first block, whose rows see fewest keys."""
        for stretch in self._stretches():
            size = BLOCK_ROWS.get(self.on_device_S.device.type, BLOCK_ROWS_ACCELERATOR)
            size = max(size, BLOCK_ROWS_CONTIGUOUS) if stretch.is_contiguous else size
            first = len(stretch) - max(0, round(len(stretch) / size) - 1) * size
            yield stretch._part(0, first)
            if first < len(stretch):
                yield from stretch._part(first, len(stretch)).split(size)

    def masked_blocks(self, groups: int | None, window: int | None, dtype: torch.dtype) -> Iterable[Block]:
        """`blocks` with their masks of the scores' dtype, cached for the next layer up to `MAX_CACHED_MASK_BYTES`.

        `groups` is G of masks over all keys, the form that PyTorch's kernel needs; None for masks of the hidden keys only.
        """
        if len(self) * (groups or 1) * (int(self.positions_S[-1]) + 1) * dtype.itemsize > MAX_CACHED_MASK_BYTES:
            return self._mask_blocks(groups, window, dtype)
        kind = groups, window, dtype
        if kind not in self._masked:
            self._masked[kind] = list(self._mask_blocks(groups, window, dtype))
        return self._masked[kind]

    def _mask_blocks(self, groups: int | None, window: int | None, dtype: torch.dtype) -> Iterator[Block]:
        done, last_stop = 0, int(self.positions_S[-1]) + 1
        for rows in self.blocks():
            start = 0 if window is None else max(0, first_seen(rows.first, window))
            start -= start % KEYS_MULTIPLE
            stop = min(-(-(int(rows.positions_S[-1]) + 1) // KEYS_MULTIPLE) * KEYS_MULTIPLE, last_stop)
            hidden_from = rows.first + 1 if window is None and groups is None else 0
            bias_BGT = _mask(rows, groups or 1, start + hidden_from, stop, window, dtype)
            yield Block(slice(done, done + len(rows)), start, stop, bias_BGT, hidden_from)
            done += len(rows)

    def _stretches(self) -> Iterator[Rows]:
        """The rows cut before and after every long run of neighbours, and on the CPU at every long gap."""
        steps = np.diff(self.positions_S.numpy())
        gaps = np.flatnonzero(steps > 1) + 1  # a run begins at each
        starts, stops = (np.concatenate(ends) for ends in (([0], gaps), (gaps, [len(self)])))
        is_long = stops - starts >= LONG_RUN
        cuts = {0, len(self), *starts[is_long], *stops[is_long]}
        if self.on_device_S.device.type == "cpu":
            cuts |= {*(np.flatnonzero(steps > LONG_GAP) + 1)}
        for start, stop in pairwise(sorted(map(int, cuts))):
            yield self._part(start, stop)

    def _part(self, start: int, stop: int) -> Rows:
        return Rows(self.positions_S[start:stop], self.on_device_S[start:stop])


def attend(
    q_1QSD: torch.Tensor,
    k_1HND: torch.Tensor,
    v_1HND: torch.Tensor,
    rows: Rows,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output (1, S, Q, D) of the rows, in the queries' dtype.

    Queries and keys are rotated. Keys and values of positions that no row sees may be anything.

    Scores are multiplied by `scaling`, and with `softcap` become softcap * tanh(scores / softcap). A row sees itself and the
    `window - 1` positions before it, or what `ChunkWindow` says; None for all. A query head's sink is the score of no key, and
    takes part in the softmax.
    """
    windowed = window is not None and int(rows.positions_S[-1]) >= window
    if rows.is_contiguous and rows.first * SKIPPED_PART <= len(rows) and not windowed and softcap is None and sinks_Q is None:
        stop = rows.first + len(rows)
        # This call equals transformers' sdpa path, so that ratio 1.0 runs full prefill's own kernel. Its causal mask begins
        # at position 0; outputs of the few positions before the rows are dropped.
        q_1QND = torch.nn.functional.pad(q_1QSD, (0, 0, rows.first, 0)) if rows.first else q_1QSD
        out_1QND = torch.nn.functional.scaled_dot_product_attention(
            q_1QND, k_1HND[:, :, :stop], v_1HND[:, :, :stop], is_causal=stop > 1, scale=scaling, enable_gqa=True
        )
        return out_1QND[:, :, rows.first :].transpose(1, 2).contiguous()
    kernel = row_kernel(q_1QSD.dtype, q_1QSD.device, q_1QSD.shape[-1])
    if kernel is not None and v_1HND.shape[-1] == q_1QSD.shape[-1]:
        scores: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks_Q": sinks_Q}
        return kernel.attend(q_1QSD, k_1HND, v_1HND, rows.positions_S, window=window, **scores)
    # The G query heads of a KV head stand side by side as rows, X = B x G of a block, so that its keys are read once.
    q_HSGD = q_1QSD[0].unflatten(0, (k_1HND.shape[1], -1)).transpose(1, 2)
    groups, outputs = q_HSGD.shape[2], list[torch.Tensor]()
    by_products = softcap is not None or sinks_Q is not None or (q_1QSD.device.type == "cpu" and q_1QSD.dtype in HALF)
    for block in rows.masked_blocks(None if by_products else groups, window if windowed else None, q_1QSD.dtype):
        q_HXD = q_HSGD[:, block.rows].flatten(1, 2)
        k_HKD, v_HKD = k_1HND[0, :, block.start : block.stop], v_1HND[0, :, block.start : block.stop]
        if by_products:
            out_HXD = torch.matmul(attention_weights(q_HXD, k_HKD, block, scaling, softcap, sinks_Q), v_HKD)
        else:
            bias_11XK = block.bias_BGT.flatten(0, 1)[None, None]
            out_HXD = torch.nn.functional.scaled_dot_product_attention(
                q_HXD[None], k_HKD[None], v_HKD[None], attn_mask=bias_11XK, scale=scaling
            )[0]
        outputs.append(out_HXD.unflatten(1, (-1, groups)))
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1, 2)[None].contiguous()


def _mask(block: Rows, groups: int, start: int, stop: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """`Block.bias_BGT` of the keys from `start` to `stop`.

    Keys up to the block's first position, and within the last position's window, are seen by all rows and not compared.
    """
    first, last = int(block.positions_S[0]), int(block.positions_S[-1])
    rows_B11 = block.on_device_S[:, None, None]
    bias_BGT = torch.zeros(len(block), groups, stop - start, dtype=dtype, device=rows_B11.device)
    future_T = torch.arange(first + 1, stop, device=rows_B11.device)
    bias_BGT[..., first + 1 - start :] = torch.where(future_T > rows_B11, -torch.inf, 0.0)
    if window is not None:
        past_T = torch.arange(start, max(start, first_seen(last, window)), device=rows_B11.device)
        bias_BGT[..., : len(past_T)] += torch.where(past_T < first_seen(rows_B11, window), -torch.inf, 0.0)
    return bias_BGT


def attention_weights(
    q_HXD: torch.Tensor,
    k_HKD: torch.Tensor,
    block: Block | None,
    scaling: float,
    softcap: float | None = None,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax weights (H, X, K) of a block's rows over its keys, in the queries' dtype; X = B x G.

    None for a block is one row that sees all keys.
    """
    q_HXD = q_HXD * scaling
    if len(k_HKD) == 1:  # a product of matrices takes half the time of a batch of one
        scores_HXK = torch.mm(q_HXD[0], k_HKD[0].t())[None]
    else:  # of keys that are a slice of more the CPU's transposed product takes 1.6 times as long
        keys_HKD = k_HKD.contiguous() if k_HKD.device.type == "cpu" else k_HKD
        scores_HXK = torch.matmul(q_HXD, keys_HKD.transpose(1, 2))
    if softcap is not None:
        scores_HXK = torch.tanh(scores_HXK / softcap) * softcap
    if block is not None:
        scores_HXK.unflatten(1, (len(block.bias_BGT), -1))[..., block.hidden_from :] += block.bias_BGT
    if sinks_Q is None:
        return torch.softmax(scores_HXK, dim=-1, out=scores_HXK)
    sinks_HG = sinks_Q.to(scores_HXK.dtype).unflatten(0, (len(scores_HXK), -1))
    sinks_HX1 = sinks_HG.repeat(1, scores_HXK.shape[1] // sinks_HG.shape[1])[..., None]
    return torch.softmax(torch.cat([scores_HXK, sinks_HX1], dim=-1), dim=-1)[..., :-1]


class HeadRows(ctypes.Structure):
    """A tensor's rows in the C files' layout: `Rows` of row_attention.c, `New` of decode_attention.c."""

    _fields_ = (("at", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))

    @classmethod
    def of(cls, x_1HND: torch.Tensor) -> HeadRows:
        """The place of a tensor's rows; the last axis must be contiguous."""
        return cls(x_1HND.data_ptr(), x_1HND.stride(2), x_1HND.stride(1))


class RowKernel:
    """The compiled `row_attention.c`, for one head size and dtype; an OSError if the process may not use AMX."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if library.prepare() != 0:
            raise OSError("the system does not let this process use AMX")
        self._rotate = function(library, "rotate", "pllllppllii")
        self._call = function(library, "row_attention", "ppppllllffpiplp", fails=True)

    def attend(
        self,
        q_1QSD: torch.Tensor,
        k_1HND: torch.Tensor,
        v_1HND: torch.Tensor,
        positions_S: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks_Q: torch.Tensor | None = None,
        weights_2K: torch.Tensor | None = None,
        weighed_from: int = 0,
    ) -> torch.Tensor:
        """Attention output (1, S, Q, D); the arguments are those of the function `attend`, the rows a sorted LongTensor.

        `weights_2K` is a float32 output for weights over the keys up to the last row's, summed over heads: of all rows from
        `weighed_from` on, and of the last row; None to skip it.
        """
        _, heads, rows, size = q_1QSD.shape
        operands = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_1QSD, k_1HND, v_1HND)]
        positions_S = positions_S.contiguous()
        out_1SQD = q_1QSD.new_empty(1, rows, heads, size)
        kv_heads = k_1HND.shape[1]
        sinks_Q = None if sinks_Q is None else sinks_Q.float().contiguous()
        failed = self._call(
            *(ctypes.byref(HeadRows.of(x)) for x in operands),
            positions_S.data_ptr(),
            rows,
            kv_heads,
            heads // kv_heads,
            -window if isinstance(window, ChunkWindow) else window or ALL_KEYS,
            scaling,
            softcap or 0.0,
            None if sinks_Q is None else sinks_Q.data_ptr(),
            torch.get_num_threads(),
            out_1SQD.data_ptr(),
            weighed_from,
            None if weights_2K is None else weights_2K.data_ptr(),
        )
        if failed:
            raise MemoryError(f"the system has no memory left for the attention of {rows} rows over {k_1HND.shape[2]} keys")
        return out_1SQD

    def rotate(
        self, k_1HTD: torch.Tensor, cos_1TX: torch.Tensor, sin_1TX: torch.Tensor, *, rounds_products: bool = False
    ) -> None:
        """Rotate keys in place, which may be a slice of a layer's: the two halves of their first X numbers against each other.

        The second half of cosines and sines repeats the first. With `rounds_products` both products are rounded before they are
        added; else the second is added unrounded.
        """
        _, heads, rows, _ = k_1HTD.shape
        cos_1TX, sin_1TX = cos_1TX.contiguous(), sin_1TX.contiguous()
        self._rotate(
            k_1HTD.data_ptr(),
            k_1HTD.stride(1),
            k_1HTD.stride(2),
            heads,
            rows,
            cos_1TX.data_ptr(),
            sin_1TX.data_ptr(),
            cos_1TX.shape[-1],
            cos_1TX.shape[-1] // 2,
            rounds_products,
            torch.get_num_threads(),
        )

    def rotation_of(self, rotate: Rotate, cos_sin: CosSin, k_1HND: torch.Tensor) -> Turn | None:
        """The compiled in-place rotation that equals a model's rotation bit for bit; None if neither variant does.

        They are compared at the positions of `cos_sin`, on random keys of the shape and dtype of a layer's `k_1HND`.
        """
        _, heads, _, size = k_1HND.shape
        if cos_sin[0].dtype != k_1HND.dtype or cos_sin[0].shape[-1] > size:
            return None
        generator = torch.Generator().manual_seed(0)
        k_1HTD = torch.randn(1, heads, cos_sin[0].shape[1], size, generator=generator).to(k_1HND.dtype)
        own_1HTD = rotate(k_1HTD, cos_sin)
        for rounds_products in (False, True):
            turn = functools.partial(self.rotate, rounds_products=rounds_products)
            mine_1HTD = k_1HTD.clone()
            turn(mine_1HTD, *cos_sin)
            if torch.equal(mine_1HTD, own_1HTD):
                return turn
        return None


def row_kernel(dtype: torch.dtype, device: torch.device, head_size: int) -> RowKernel | None:
    """The kernel for a model, compiled at its first use; None if PyTorch's attention runs instead."""
    is_served = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    fits = head_size % HEAD_MULTIPLE == 0 and head_size <= MAX_HEAD_SIZE
    return _load(dtype, head_size) if is_served and fits else None


@functools.cache
def _load(dtype: torch.dtype, head_size: int) -> RowKernel | None:
    is_half = dtype == torch.bfloat16
    if is_half and not any(map(has_feature, FEATURES)):
        return None
    has_amx = is_half and has_feature(FEATURES[0])
    shape = [f"-DHEAD_SIZE={head_size}", *(["-DBFLOAT16"] if is_half else []), *(["-DAMX"] if has_amx else [])]

    error_of = functools.partial(_error_of, dtype=dtype, head_size=head_size)
    allowed = 1e-2 if is_half else 1e-5  # outputs are about 1
    return load_or_warn(SOURCE, shape, RowKernel, "rows attend by PyTorch's slower products", error_of, allowed)


def _error_of(kernel: RowKernel, dtype: torch.dtype, head_size: int) -> float:
    """The largest difference from attention in float32, for cases with and without window, chunks, soft-capping and sinks."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, groups, keys = 2, 3, 601
    rows = Rows.of(torch.cat([torch.arange(0, keys, 23), torch.tensor([keys - 2, keys - 1])]).unique(), torch.device("cpu"))
    q_1QSD, k_1HND, v_1HND = (
        torch.randn(1, heads, count, head_size, generator=generator).to(dtype)
        for heads, count in ((kv_heads * groups, len(rows)), (kv_heads, keys), (kv_heads, keys))
    )
    q_HXD = q_1QSD[0].unflatten(0, (kv_heads, groups)).transpose(1, 2).flatten(1, 2).float()
    sinks_Q, errors = torch.linspace(-1, 2, kv_heads * groups), list[torch.Tensor]()
    cases = (None, None, None), (300, 2.0, None), (300, None, sinks_Q), (None, 2.0, sinks_Q), (ChunkWindow(250), None, None)
    for window, softcap, sinks in cases:
        how: dict[str, Any] = {"scaling": head_size**-0.5, "softcap": softcap, "sinks_Q": sinks}
        block = Block(slice(None), 0, keys, _mask(rows, 1, 0, keys, window, torch.float32), 0)
        weights_HXK, weights_2K = attention_weights(q_HXD, k_1HND[0].float(), block, **how), torch.zeros(2, keys)
        expected = torch.matmul(weights_HXK, v_1HND[0].float()).unflatten(1, (-1, groups)).transpose(0, 1).flatten(1, 2)[None]
        got = kernel.attend(
            q_1QSD, k_1HND, v_1HND, rows.positions_S, window=window, weights_2K=weights_2K, weighed_from=3, **how
        )
        errors.append((got - expected).abs().max())
        for got_K, of_rows in zip(weights_2K, (weights_HXK[:, 3 * groups :], weights_HXK[:, -groups:]), strict=True):
            errors.append((got_K - of_rows.sum((0, 1))).abs().max() / of_rows[..., 0].numel())
    return float(torch.stack(errors).max())
