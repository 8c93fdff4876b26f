"""Codecs: the keys and values of one layer as the one tensor that is stored, and back.

A codec is a small class in this file, entered in `CODECS`. It packs scales into the tensor of the values, so that a layer stays
one contiguous read.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from cacheblend.base.errors import InputError

from .chunk import LayerPair

_ALIGNMENT = 16  # bytes; packed tensors that stand one after the other in a buffer can still be viewed as floats


class LayerShape(NamedTuple):
    """Shape of the decoded keys of a layer, and of its values."""

    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype


class EncodedShape(NamedTuple):
    """Shape of a stored tensor."""

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
        """The codec's name, which is part of an entry's key."""

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """Shape of the tensor that `encode` fills for such a layer: a file of another shape is damaged."""

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """Fill the stored tensors of L layers of one shape, contiguous on the CPU; computed where keys and values are.

        Args:
            layers: L times `k_HTD` and `v_HTD`.
            encoded: `(L, *encoded_shape)`.

        Raises:
            InputError: the codec cannot hold a value.

        """

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """`k_HTD` and `v_HTD` of the layer's dtype, where `encoded` is; may be views of it."""


def packed_shape(parts: Sequence[EncodedShape]) -> EncodedShape:
    """Shape of the tensor that `pack` fills with such parts."""
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


class RawCodec:
    """Stores `(2, H, T, D)`: keys, then values."""

    name = "raw"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        return EncodedShape(layer.dtype, (2, layer.kv_heads, layer.tokens, layer.head_dim))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """Fill the tensors in one operation: each operation releases the interpreter, and returns late beside busy threads."""
        with torch.no_grad():
            torch.stack(
                [x_HTD if x_HTD.is_cpu else x_HTD.cpu() for pair in layers for x_HTD in pair], out=encoded.flatten(0, 1)
            )

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        return encoded[0], encoded[1]


_FP8_LARGEST = 448.0  # of float8_e4m3fn
_TINY = 2.0**-126  # the least normal float32


class Fp8Codec:
    """Stores scales float32 `(2, H)`, then values float8 `(2, H, T, D)`: keys, then values.

    A value's relative error is at most 2**-4; below 2**-14 of its head's largest value, the absolute error is at most 2**-18 of
    that.
    """

    name = "fp8_e4m3"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        x_2HTD = torch.stack(as_float32(self.name, k_HTD, v_HTD))
        scale_2H = (x_2HTD.abs().amax((2, 3)) / _FP8_LARGEST).clamp_(min=_TINY)
        # Clamped: a value that rounding puts above the largest would become NaN.
        codes_2HTD = (x_2HTD / scale_2H[:, :, None, None]).clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(torch.float8_e4m3fn)
        pack((scale_2H, codes_2HTD), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        scale_2H, codes_2HTD = unpack(encoded, self._parts(layer))
        k_HTD, v_HTD = codes_2HTD.float().mul_(scale_2H[:, :, None, None]).to(layer.dtype)
        return k_HTD, v_HTD

    def _parts(self, layer: LayerShape) -> tuple[EncodedShape, ...]:
        heads, tokens, dim, _ = layer
        return EncodedShape(torch.float32, (2, heads)), EncodedShape(torch.float8_e4m3fn, (2, heads, tokens, dim))


_INT8_LARGEST = 127


class Int8Codec:
    """Stores scales float32 of keys `(H, 1, D)` and values `(H, T, 1)`, then int8 `(2, H, T, D)`.

    An error is at most 1/254 of the largest value that shares the scale.
    """

    name = "int8"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        k_HTD, v_HTD = as_float32(self.name, k_HTD, v_HTD)
        k_scale_H1D = (k_HTD.abs().amax(1, keepdim=True) / _INT8_LARGEST).clamp_(min=_TINY)
        v_scale_HT1 = (v_HTD.abs().amax(2, keepdim=True) / _INT8_LARGEST).clamp_(min=_TINY)
        codes_2HTD = torch.stack((k_HTD / k_scale_H1D, v_HTD / v_scale_HT1)).round_().clamp_(-_INT8_LARGEST, _INT8_LARGEST)
        pack((k_scale_H1D, v_scale_HT1, codes_2HTD.to(torch.int8)), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        k_scale_H1D, v_scale_HT1, codes_2HTD = unpack(encoded, self._parts(layer))
        return (codes_2HTD[0] * k_scale_H1D).to(layer.dtype), (codes_2HTD[1] * v_scale_HT1).to(layer.dtype)

    def _parts(self, layer: LayerShape) -> tuple[EncodedShape, ...]:
        heads, tokens, dim, _ = layer
        return (
            EncodedShape(torch.float32, (heads, 1, dim)),
            EncodedShape(torch.float32, (heads, tokens, 1)),
            EncodedShape(torch.int8, (2, heads, tokens, dim)),
        )


GROUP = 32
_INT4_LARGEST = 15
_HALF_LARGEST = 65504.0
_HALF_TINY = 2.0**-24


class Int4Codec:
    """Stores float16 floor and step of keys `(2, H, G, D)` and values `(2, H, T, G)`, then bytes `(H, T, D)`.

    A byte holds a key in its low half and a value in its high half. An error is at most half a step (1/30 of the group's span)
    plus the rounding of the floor to float16.
    """

    name = "int4"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        k_HTD, v_HTD = as_float32(self.name, k_HTD, v_HTD, largest=_HALF_LARGEST)
        k_range_2HGD, k_codes_HTD = _quantise(k_HTD, 1)
        v_range_2HTG, v_codes_HTD = _quantise(v_HTD, 2)
        pack((k_range_2HGD, v_range_2HTG, k_codes_HTD | v_codes_HTD << 4), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        k_range_2HGD, v_range_2HTG, codes_HTD = unpack(encoded, self._parts(layer))
        k_HTD = _dequantise(k_range_2HGD, codes_HTD & _INT4_LARGEST, 1)
        v_HTD = _dequantise(v_range_2HTG, codes_HTD >> 4, 2)
        return k_HTD.to(layer.dtype), v_HTD.to(layer.dtype)

    def _parts(self, layer: LayerShape) -> tuple[EncodedShape, ...]:
        heads, tokens, dim, _ = layer
        return (
            EncodedShape(torch.float16, (2, heads, -(-tokens // GROUP), dim)),
            EncodedShape(torch.float16, (2, heads, tokens, -(-dim // GROUP))),
            EncodedShape(torch.uint8, (heads, tokens, dim)),
        )


def _quantise(x_HTD: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floor and step of each group of `GROUP` along `dim`, stacked, and the codes; the last group may be smaller."""
    groups = x_HTD.split(GROUP, dim)
    floor = torch.cat([group.amin(dim, keepdim=True) for group in groups], dim)
    ceiling = torch.cat([group.amax(dim, keepdim=True) for group in groups], dim)
    ranges = torch.stack((floor, ((ceiling - floor) / _INT4_LARGEST).clamp_(min=_HALF_TINY))).half()
    floor, step = (_spread(part, x_HTD.shape[dim], dim) for part in ranges.float())
    return ranges, ((x_HTD - floor) / step).round_().clamp_(0, _INT4_LARGEST).to(torch.uint8)


def _dequantise(ranges: torch.Tensor, codes_HTD: torch.Tensor, dim: int) -> torch.Tensor:
    floor, step = (_spread(part, codes_HTD.shape[dim], dim) for part in ranges.float())
    return codes_HTD * step + floor


def _spread(grouped: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Each group's number at every place of the group."""
    return grouped.repeat_interleave(GROUP, dim).narrow(dim, 0, size)


_ALL: tuple[Codec, ...] = (RawCodec(), Fp8Codec(), Int8Codec(), Int4Codec())
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
