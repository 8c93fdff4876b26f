"""Attention of the last token of every sequence of a batch, and the KV that it runs over.

In a decoding step each sequence is one row: projections and MLP run for all sequences at once, which reads the weights once;
attention runs for each sequence over its own keys. So nothing is padded or masked, and a sequence joins or leaves between two
steps without a copy of another's KV.

On a CPU one call of `decode_attention.c` serves all sequences of a layer, wherever their KV lies, at the speed at which memory
is read. The file is compiled at its first use on a machine, for the model's shape, where there is a C compiler; without one
PyTorch's attention is called for each sequence.

Shapes: R sequences, Q query heads, H KV heads, G = Q / H, K keys that a sequence sees, C room for keys, D head size.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.store import LayerPair

from . import layer_source
from .attention import HeadRows
from .compiled_file import check_error, function, load_or_warn

if TYPE_CHECKING:
    from torch import nn

SOURCE = Path(__file__).with_name("decode_attention.c")
MAX_VECTORS = 256  # of 16 numbers each, for a KV head's queries: more do not fit the registers


class SequenceLayerKV:
    """One layer of a sequence's KV.

    Args:
        k_HKD: keys.
        v_HKD: values.
        window: number of last positions that the layer sees; None for all.
        memory_21HCD: buffer that begins with these keys and values and has free room after them; None to copy them.
    """

    def __init__(
        self, k_HKD: torch.Tensor, v_HKD: torch.Tensor, window: int | None, memory_21HCD: torch.Tensor | None = None
    ) -> None:
        self._window = window
        if memory_21HCD is None:
            self._move(k_HKD, v_HKD)
        else:
            self._used = k_HKD.shape[1]
            self._k_HCD, self._v_HCD = memory_21HCD[:, 0]
            self._address()

    def append(self, k_H1D: torch.Tensor, v_H1D: torch.Tensor) -> None:
        """Add the next position."""
        self.reserve()
        self._k_HCD[:, self._used : self._used + 1] = k_H1D
        self._v_HCD[:, self._used : self._used + 1] = v_H1D
        self._used += 1

    def visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (H, K, D) that the last position sees."""
        start = 0 if self._window is None else max(0, self._used - self._window)
        return self._k_HCD[:, start : self._used], self._v_HCD[:, start : self._used]

    def last(self, tokens: int) -> LayerPair:
        """Keys and values (H, tokens, D) of the last positions; views that the next append may invalidate."""
        return self._k_HCD[:, self._used - tokens : self._used], self._v_HCD[:, self._used - tokens : self._used]

    def reserve(self) -> None:
        """Make room for the next position."""
        if self._used == self._k_HCD.shape[1]:
            start = 0 if self._window is None else max(0, self._used - self._window)
            self._move(self._k_HCD[:, start : self._used], self._v_HCD[:, start : self._used])

    def begin_append(self) -> tuple[int, int, int, int, int]:
        """Count the next position, which the caller writes; returns the C file's `Sequence` as five numbers."""
        self.reserve()
        self._used += 1
        first = 0 if self._window is None else max(0, self._used - self._window)
        return (*self._at, first, self._used - 1)

    def _move(self, k_HKD: torch.Tensor, v_HKD: torch.Tensor) -> None:
        heads, self._used, size = k_HKD.shape
        room = self._used + layer_source.GROWTH_TOKENS
        kv_X = layer_source.empty_layer((heads * room * (size + v_HKD.shape[-1]),), k_HKD.dtype, k_HKD.device)
        k_X, v_X = kv_X.split([heads * room * size, heads * room * v_HKD.shape[-1]])
        self._k_HCD, self._v_HCD = k_X.view(heads, room, -1), v_X.view(heads, room, -1)
        self._k_HCD[:, : self._used] = k_HKD
        self._v_HCD[:, : self._used] = v_HKD
        self._address()

    def _address(self) -> None:
        self._at = (self._k_HCD.data_ptr(), self._v_HCD.data_ptr(), self._k_HCD.stride(0))


class DecodePass:
    """One layer's pass over the last token of every sequence; the counterpart of a prompt's `RowsPass`.

    Args:
        layers: the layer's KV of every sequence.
        kernel: compiled attention for all sequences in one call; None for PyTorch's attention.
    """

    def __init__(self, layers: Sequence[SequenceLayerKV], kernel: DecodeKernel | None = None) -> None:
        self._layers, self._kernel = layers, kernel

    def update(self, k_1HRD: torch.Tensor, v_1HRD: torch.Tensor, layer: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each sequence's key and value to its own KV; with a kernel `attend` does."""
        if self._kernel is None:
            for row, kv in enumerate(self._layers):
                kv.append(k_1HRD[0, :, row : row + 1], v_1HRD[0, :, row : row + 1])
        return k_1HRD, v_1HRD

    def attend(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
    ) -> torch.Tensor:
        """Attention output (1, R, Q, D), each row over its own sequence's keys."""
        if self._kernel is not None:
            return self._kernel.attend(q, k, v, self._layers, scaling=kw["scaling"], softcap=kw.get("softcap"))
        rows = [
            _attend_one(q[0, :, row], *kv.visible(), scaling=kw["scaling"], softcap=kw.get("softcap"))
            for row, kv in enumerate(self._layers)
        ]
        return torch.stack(rows)[None]


def _attend_one(
    q_QD: torch.Tensor, k_HKD: torch.Tensor, v_HKD: torch.Tensor, *, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Output (Q, D) of one row that sees all keys given."""
    q_HGD = q_QD.unflatten(0, (k_HKD.shape[0], -1))  # the query heads of one KV head are rows over the same keys
    if softcap is None:
        # With a batch dimension PyTorch runs its flash kernel, which is four times as fast on a CPU.
        return scaled_dot_product_attention(q_HGD[None], k_HKD[None], v_HKD[None], scale=scaling)[0].flatten(0, 1)
    scores_HGK = torch.matmul(q_HGD, k_HKD.transpose(1, 2)) * scaling
    scores_HGK = torch.tanh(scores_HGK / softcap) * softcap
    weights_HGK = torch.softmax(scores_HGK, dim=-1, dtype=torch.float32).to(q_QD.dtype)
    return torch.matmul(weights_HGK, v_HKD).flatten(0, 1)


class DecodeKernel:
    """The compiled `decode_attention.c`.

    Args:
        library: the compiled file, for one number of query heads to a KV head, head size and dtype.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = function(library, "decode_attention", "ppppiiffip", fails=True)

    def attend(
        self,
        q_1QRD: torch.Tensor,
        k_1HRD: torch.Tensor,
        v_1HRD: torch.Tensor,
        layers: Sequence[SequenceLayerKV],
        *,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Append each sequence's key and value; output (1, R, Q, D) of its query."""
        _, heads, count, size = q_1QRD.shape
        words: list[int] = []
        for kv in layers:
            words += kv.begin_append()
        sequences = (ctypes.c_int64 * len(words))(*words)
        fresh = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_1QRD, k_1HRD, v_1HRD)]
        new = map(HeadRows.of, fresh)
        out_1RQD = q_1QRD.new_empty(1, count, heads, size)
        failed = self._call(
            *map(ctypes.byref, new),
            sequences,
            count,
            k_1HRD.shape[1],
            scaling,
            softcap or 0.0,
            torch.get_num_threads(),
            out_1RQD.data_ptr(),
        )
        if failed:
            raise MemoryError("the system has no memory left for a decoding step's attention weights")
        return out_1RQD


def decode_kernel(geometry: layer_source.KVGeometry, query_heads: int) -> DecodeKernel | None:
    """The kernel for a model's shape, compiled where that was not done before; None where PyTorch's attention serves."""
    groups = query_heads // geometry.kv_heads
    if geometry.device.type != "cpu" or geometry.dtype not in (torch.float32, torch.bfloat16) or geometry.head_dim % 4:
        return None
    if groups * geometry.head_dim > 16 * MAX_VECTORS:
        return None
    return _load(groups, geometry.head_dim, geometry.dtype)


@functools.cache
def _load(groups: int, head_size: int, dtype: torch.dtype) -> DecodeKernel | None:
    shape = [f"-DGROUPS={groups}", f"-DHEAD_SIZE={head_size}", *(["-DBFLOAT16"] if dtype == torch.bfloat16 else [])]

    def make(library: ctypes.CDLL) -> DecodeKernel:
        kernel = DecodeKernel(library)
        check_error(_error_of(kernel, groups, head_size, dtype), 1e-5 if dtype == torch.float32 else 2e-2)
        return kernel

    return load_or_warn(SOURCE, shape, make, "PyTorch's slower attention decodes")


def _error_of(kernel: DecodeKernel, groups: int, head_size: int, dtype: torch.dtype) -> float:
    """The largest difference from PyTorch's attention, for one small case with a window and one without."""
    generator = torch.Generator().manual_seed(0)
    heads, lengths, windows = 2, (19, 40), (None, 7)
    draw = functools.partial(torch.randn, generator=generator, dtype=dtype)
    q, k, v = draw(1, heads * groups, 2, head_size), draw(1, heads, 2, head_size), draw(1, heads, 2, head_size)
    stored = [draw(2, heads, length, head_size) for length in lengths]
    outputs = []
    for own in (kernel, None):
        layers = [SequenceLayerKV(kv[0], kv[1], window) for kv, window in zip(stored, windows, strict=True)]
        layer_pass = DecodePass(layers, own)
        layer_pass.update(k, v, 0)
        outputs.append(layer_pass.attend(None, q, k, v, None, scaling=head_size**-0.5, softcap=3.0))  # type: ignore[arg-type]  # the module is not looked at
    return float((outputs[0] - outputs[1]).abs().max())
