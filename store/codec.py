"""How the keys and values of one layer become the one tensor that is stored, and back.

A codec is one small class with this interface, entered in `CODECS`. What it needs beside the values (scales, say) it packs
into the same tensor, so that a layer stays one contiguous read.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from .chunk import LayerPair


class LayerShape(NamedTuple):
    """What the decoded keys of a layer look like, and its values as well."""

    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype


class EncodedShape(NamedTuple):
    """What the one stored tensor of a layer looks like."""

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
        """What `encode` gives for such a layer: a file that says otherwise is damaged."""

    def encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> torch.Tensor:
        """One contiguous tensor on the CPU that shares no memory with its arguments."""

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """`k_HTD` and `v_HTD`; may be views of `encoded`."""


class RawCodec:
    """The model's own dtype, as `(2, H, T, D)`: keys, then values."""

    name = "raw"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return EncodedShape(layer.dtype, (2, layer.kv_heads, layer.tokens, layer.head_dim))

    def encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> torch.Tensor:
        """See `Codec`."""
        encoded_2HTD = torch.empty((2, *k_HTD.shape), dtype=k_HTD.dtype, device="cpu")
        encoded_2HTD[0].copy_(k_HTD.detach())
        encoded_2HTD[1].copy_(v_HTD.detach())
        return encoded_2HTD

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        return encoded[0], encoded[1]


CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in (RawCodec(),)})
