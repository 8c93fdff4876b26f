"""Attention of chosen rows in bfloat16, by the matrix instructions of CPUs that have AMX; and the rotation of stored keys.

`row_attention.c` takes each row over the keys up to its own position and no others, and never has the scores of more than a few
rows in memory. It is compiled when a model is first loaded on a machine, for its head size, where there is a C compiler; other
processors, and head sizes that do not fill its tiles, have the blocks of `attention`.

Shapes: Q query heads, H KV heads, S rows, N keys, D head size.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .compiled_file import has_feature, load_or_warn

SOURCE = Path(__file__).with_name("row_attention.c")
FEATURE = "amx_bf16"
HEAD_MULTIPLE, MAX_HEAD_SIZE = 32, 256
ALL_KEYS = 2**62  # a window that no row reaches the end of
ALLOWED = 1e-2  # of outputs of about 1, that are rounded to 8 bits
logger = logging.getLogger(__name__)
if TYPE_CHECKING:  # torch is not loaded by who asks for a command's help
    CosSin = tuple[torch.Tensor, torch.Tensor]
    Rotate = Callable[[torch.Tensor, CosSin], torch.Tensor]
    Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class _Rows(ctypes.Structure):
    """`Rows` of the C file."""

    _fields_ = (("at", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))

    @classmethod
    def of(cls, x_1HND: torch.Tensor) -> _Rows:
        """The place of a tensor's rows; the last axis must be contiguous."""
        return cls(x_1HND.data_ptr(), x_1HND.stride(2), x_1HND.stride(1))


class RowKernel:
    """The compiled `row_attention.c`.

    Args:
        library: the compiled file, for one head size.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = library.row_attention
        self._call.restype = ctypes.c_int
        count, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        self._rotate = library.rotate
        self._rotate.restype = None
        self._rotate.argtypes = [pointer, *[count] * 4, pointer, pointer, count, count, ctypes.c_int, ctypes.c_int]
        self._call.argtypes = [pointer] * 4 + [count] * 4 + [real, real, ctypes.c_int, pointer, pointer, count]

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
        weights_QN: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output (1, S, Q, D) in bfloat16; see `attention.attend`.

        Args:
            q_1QSD: see `attention.attend`.
            k_1HND: see `attention.attend`.
            v_1HND: see `attention.attend`.
            positions_S: the rows', a sorted LongTensor.
            scaling: see `attention.attend`.
            window: see `attention.attend`.
            softcap: see `attention.attend`.
            weights_QN: float32, takes the last row's weights over the keys that it sees; None where nobody asks.
        """
        _, heads, rows, size = q_1QSD.shape
        operands = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_1QSD, k_1HND, v_1HND)]
        positions_S = positions_S.contiguous()
        out_1SQD = q_1QSD.new_empty(1, rows, heads, size)
        kv_heads = k_1HND.shape[1]
        failed = self._call(
            *(ctypes.byref(_Rows.of(x)) for x in operands),
            positions_S.data_ptr(),
            rows,
            kv_heads,
            heads // kv_heads,
            window or ALL_KEYS,
            scaling,
            softcap or 0.0,
            torch.get_num_threads(),
            out_1SQD.data_ptr(),
            None if weights_QN is None else weights_QN.data_ptr(),
            0 if weights_QN is None else weights_QN.shape[1],
        )
        if failed:
            raise MemoryError(f"the system has no memory left for the attention of {rows} rows over {k_1HND.shape[2]} keys")
        return out_1SQD

    def rotate(
        self, k_1HTD: torch.Tensor, cos_1TX: torch.Tensor, sin_1TX: torch.Tensor, *, rounds_products: bool = False
    ) -> None:
        """Turn keys in place, the halves of their first X numbers against each other.

        Args:
            k_1HTD: keys, which may be a slice of a layer's.
            cos_1TX: of each position, X numbers of which the second half is the first again.
            sin_1TX: the same.
            rounds_products: to bfloat16, before they are added; else the sums alone are rounded.
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

    def rotation_of(self, rotate: Rotate, cos_sin: CosSin, shape: torch.Size) -> Turn | None:
        """A model's rotation of keys, in place and to the bit; None where it is another than these two.

        Args:
            rotate: the model's, which gives new keys.
            cos_sin: of the positions to compare it at.
            shape: of a layer's keys, (1, H, N, D).
        """
        generator = torch.Generator().manual_seed(0)
        k_1HTD = torch.randn(*shape[:2], cos_sin[0].shape[1], shape[3], generator=generator).bfloat16()
        own_1HTD = rotate(k_1HTD, cos_sin)
        for rounds_products in (False, True):
            turn = functools.partial(self.rotate, rounds_products=rounds_products)
            mine_1HTD = k_1HTD.clone()
            turn(mine_1HTD, *cos_sin)
            if torch.equal(mine_1HTD, own_1HTD):
                return turn
        return None


def row_kernel(dtype: torch.dtype, device: torch.device, head_size: int) -> RowKernel | None:
    """The kernel for a model, compiled where that was not done before; None where other attention serves."""
    if dtype != torch.bfloat16 or device.type != "cpu" or head_size % HEAD_MULTIPLE or head_size > MAX_HEAD_SIZE:
        return None
    return _load(head_size)


@functools.cache
def _load(head_size: int) -> RowKernel | None:
    if not has_feature(FEATURE):
        return None
    library = load_or_warn(SOURCE, [f"-DHEAD_SIZE={head_size}"], "rows attend by PyTorch's slower products")
    if library is None:
        return None
    if library.prepare() != 0:
        logger.warning("the system does not let this process use AMX: rows attend by PyTorch's slower products")
        return None
    kernel = RowKernel(library)
    off = _error_of(kernel, head_size)
    if not off <= ALLOWED:  # nor where it is not a number
        logger.warning("row_attention.c as it was compiled is off by %.2g and not used", off)
        return None
    return kernel


def _error_of(kernel: RowKernel, head_size: int) -> float:
    """The largest difference from attention in float32, for a case with window and soft-capping and one without."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, groups, keys = 2, 3, 601
    positions_S = torch.cat([torch.arange(0, keys, 23), torch.tensor([keys - 2, keys - 1])]).unique()
    rows_S1, keys_N, errors = positions_S[:, None], torch.arange(keys), list[torch.Tensor]()
    q_1QSD, k_1HND, v_1HND = (
        torch.randn(1, heads, count, head_size, generator=generator).bfloat16()
        for heads, count in ((kv_heads * groups, len(positions_S)), (kv_heads, keys), (kv_heads, keys))
    )
    k_1QND, v_1QND = (x.float().repeat_interleave(groups, 1) for x in (k_1HND, v_1HND))
    for window, softcap in ((None, None), (300, 2.0)):
        scores = q_1QSD.float() @ k_1QND.transpose(2, 3) * head_size**-0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        hidden_SN = (keys_N > rows_S1) | (keys_N <= rows_S1 - (window or ALL_KEYS))
        weights = torch.softmax(scores.masked_fill(hidden_SN, -torch.inf), -1)
        expected = (weights @ v_1QND).transpose(1, 2)
        last_QN = torch.zeros(kv_heads * groups, keys)
        got = kernel.attend(
            q_1QSD, k_1HND, v_1HND, positions_S, scaling=head_size**-0.5, window=window, softcap=softcap, weights_QN=last_QN
        )
        errors += [(got - expected).abs().max(), (last_QN - weights[0, :, -1]).abs().max()]
    return float(torch.stack(errors).max())
