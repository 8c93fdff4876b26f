"""How the keys and values of one layer become the one tensor that is stored, and back.

A codec is one small class with this interface, in a file of its own and entered in `codecs.py`. What it needs beside the values
(scales, say) it packs into the same tensor, so that a layer stays one contiguous read.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from cacheblend.base.errors import InputError

from .chunk import LayerPair

_ALIGNMENT = 16  # bytes; packed tensors that stand one behind the other in a buffer can still be viewed as floats


class LayerShape(NamedTuple):
    """What the decoded keys of a layer look like, and its values as well."""

    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype


class EncodedShape(NamedTuple):
    """What a stored tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(Protocol):
    """Encodes and decodes one layer; without state, used by several threads at once."""

    @property
    def name(self) -> str:
        """What the key of an entry says."""

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """What `encode` fills for such a layer: a file that says otherwise is damaged."""

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """Fill the stored tensors of L layers of one shape, contiguous on the CPU; computed where keys and values are.

        Args:
            layers: L times `k_HTD` and `v_HTD`.
            encoded: `(L, *encoded_shape)`.

        Raises:
            InputError: values that the codec cannot hold.

        """

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """`k_HTD` and `v_HTD` of the layer's dtype, where `encoded` is; may be views of it."""


def packed_shape(parts: Sequence[EncodedShape]) -> EncodedShape:
    """The shape of what `pack` fills with such parts."""
    size = sum(part.nbytes for part in parts)
    return EncodedShape(torch.uint8, (-(-size // _ALIGNMENT) * _ALIGNMENT,))


def pack(parts: Sequence[torch.Tensor], encoded: torch.Tensor) -> None:
    """Fill a tensor of `packed_shape` with tensors' bytes; those of the widest dtype come first, so that all are aligned."""
    at = 0
    for part in parts:
        encoded[at : at + part.nbytes] = part.contiguous().view(-1).view(torch.uint8)
        at += part.nbytes
    encoded[at:] = 0


def unpack(encoded: torch.Tensor, parts: Sequence[EncodedShape]) -> list[torch.Tensor]:
    """The tensors that were packed, as views, on any device."""
    views, at = [], 0
    for part in parts:
        views.append(encoded[at : at + part.nbytes].view(part.dtype).view(part.shape))
        at += part.nbytes
    return views


def as_float32(codec: str, k_HTD: torch.Tensor, v_HTD: torch.Tensor, largest: float = math.inf) -> LayerPair:
    """Keys and values in float32, for a codec that cannot hold all of them.

    Raises:
        InputError: a value is not finite, or larger than `largest`.

    """
    pair = k_HTD.detach().float(), v_HTD.detach().float()
    for name, x_HTD in zip(("keys", "values"), pair, strict=True):
        peak = float(x_HTD.abs().max())
        if not peak <= min(largest, torch.finfo(torch.float32).max):  # NaN compares false
            raise InputError(f"codec {codec!r} cannot hold {name} of size {peak}; use codec 'raw'")
    return pair
