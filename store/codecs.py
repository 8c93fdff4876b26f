"""Codecs: the keys and values of one layer as the one tensor that is stored, and back.

A codec is a small class in this file, entered in `CODECS`.

Shapes: H KV heads, T tokens, D head size, G groups.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from cacheblend.base.errors import InputError

LayerPair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_ALIGNMENT = 16  # bytes; packed tensors that stand one after the other in a buffer can still be viewed as floats
_TINY = 2.0**-126  # the least normal float32


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
        return math.prod(self.shape) * self.dtype.itemsize


class Codec:
    """Encodes and decodes one layer; without state, used by several threads at once.

    A codec packs the tensors that `pack` makes, such as scales and codes, into one tensor of bytes, so that a layer stays one
    contiguous read. Those of the widest dtype come first, so that all are aligned.
    """

    name: ClassVar[str]  # part of an entry's key
    largest: ClassVar[float] = torch.finfo(torch.float32).max  # of the values that it can hold

    def parts(self, layer: LayerShape) -> Sequence[EncodedShape]:
        raise NotImplementedError

    def pack(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors that are stored for keys and values in float32."""
        raise NotImplementedError

    def unpack(self, parts: Sequence[torch.Tensor]) -> LayerPair:
        """`k_HTD` and `v_HTD` in float32."""
        raise NotImplementedError

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """Shape of the tensor that `encode` fills for such a layer: a file of another shape is damaged."""
        size = sum(part.nbytes for part in self.parts(layer))
        return EncodedShape(torch.uint8, (-(-size // _ALIGNMENT) * _ALIGNMENT,))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """Fill the stored tensors `(L, *encoded_shape)` of L layers of one shape; computed where keys and values are.

        Raises:
            InputError: a value is not finite, or larger than `largest`.
        """
        for pair, stored in zip(layers, encoded, strict=True):
            k_HTD, v_HTD = (x_HTD.detach().float() for x_HTD in pair)
            for name, x_HTD in (("keys", k_HTD), ("values", v_HTD)):
                if not (peak := float(x_HTD.abs().max())) <= self.largest:  # NaN compares false
                    raise InputError(f"codec {self.name!r} cannot hold {name} of size {peak}; use codec 'raw'")
            at = 0
            for part in self.pack(k_HTD, v_HTD):
                stored[at : at + part.nbytes] = part.contiguous().view(-1).view(torch.uint8)
                at += part.nbytes
            stored[at:] = 0

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """`k_HTD` and `v_HTD` of the layer's dtype, where `encoded` is; may be views of it."""
        views, at = [], 0
        for part in self.parts(layer):
            views.append(encoded[at : at + part.nbytes].view(part.dtype).view(part.shape))
            at += part.nbytes
        k_HTD, v_HTD = self.unpack(views)
        return k_HTD.to(layer.dtype), v_HTD.to(layer.dtype)


class RawCodec(Codec):
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


_INT8_LARGEST = 127


class Int8Codec(Codec):
    """Stores scales float32 of keys `(H, 1, D)` and values `(H, T, 1)`, then int8 `(2, H, T, D)`.

    An error is at most 1/254 of the largest value that shares the scale.
    """

    name = "int8"

    def parts(self, layer: LayerShape) -> Sequence[EncodedShape]:
        heads, tokens, dim, _ = layer
        scales = EncodedShape(torch.float32, (heads, 1, dim)), EncodedShape(torch.float32, (heads, tokens, 1))
        return *scales, EncodedShape(torch.int8, (2, heads, tokens, dim))

    def pack(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> Sequence[torch.Tensor]:
        k_scale_H1D, v_scale_HT1 = _scale(k_HTD, 1), _scale(v_HTD, 2)
        codes_2HTD = torch.stack((k_HTD / k_scale_H1D, v_HTD / v_scale_HT1)).round_().clamp_(-_INT8_LARGEST, _INT8_LARGEST)
        return k_scale_H1D, v_scale_HT1, codes_2HTD.to(torch.int8)

    def unpack(self, parts: Sequence[torch.Tensor]) -> LayerPair:
        k_scale_H1D, v_scale_HT1, codes_2HTD = parts
        return codes_2HTD[0] * k_scale_H1D, codes_2HTD[1] * v_scale_HT1


def _scale(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What one step of a code is worth, for all values along `dim` together."""
    return (x.abs().amax(dim, keepdim=True) / _INT8_LARGEST).clamp_(min=_TINY)


GROUP = 32
_INT4_LARGEST = 15
_HALF_TINY = 2.0**-24


class Int4Codec(Codec):
    """Stores float16 floor and step of keys `(2, H, G, D)` and values `(2, H, T, G)`, then bytes `(H, T, D)`.

    A byte holds a key in its low half and a value in its high half. An error is at most half a step (1/30 of the group's span)
    plus the rounding of the floor to float16.
    """

    name = "int4"
    largest = 65504.0  # of float16

    def parts(self, layer: LayerShape) -> Sequence[EncodedShape]:
        heads, tokens, dim, _ = layer
        scales = [(2, heads, -(-tokens // GROUP), dim), (2, heads, tokens, -(-dim // GROUP))]
        return *(EncodedShape(torch.float16, each) for each in scales), EncodedShape(torch.uint8, (heads, tokens, dim))

    def pack(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> Sequence[torch.Tensor]:
        k_range_2HGD, k_codes_HTD = _quantise(k_HTD, 1)
        v_range_2HTG, v_codes_HTD = _quantise(v_HTD, 2)
        return k_range_2HGD, v_range_2HTG, k_codes_HTD | v_codes_HTD << 4

    def unpack(self, parts: Sequence[torch.Tensor]) -> LayerPair:
        k_range_2HGD, v_range_2HTG, codes_HTD = parts
        return _dequantise(k_range_2HGD, codes_HTD & _INT4_LARGEST, 1), _dequantise(v_range_2HTG, codes_HTD >> 4, 2)


def _quantise(x_HTD: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Floor and step of each group of `GROUP` along `dim`, stacked, and the codes; the last group may be smaller."""
    groups = x_HTD.split(GROUP, dim)
    floor = torch.cat([group.amin(dim, keepdim=True) for group in groups], dim)
    ceiling = torch.cat([group.amax(dim, keepdim=True) for group in groups], dim)
    ranges = torch.stack((floor, ((ceiling - floor) / _INT4_LARGEST).clamp_(min=_HALF_TINY))).half()
    floor, step = _spread(ranges, x_HTD, dim)
    return ranges, ((x_HTD - floor) / step).round_().clamp_(0, _INT4_LARGEST).to(torch.uint8)


def _dequantise(ranges: torch.Tensor, codes_HTD: torch.Tensor, dim: int) -> torch.Tensor:
    floor, step = _spread(ranges, codes_HTD, dim)
    return codes_HTD * step + floor


def _spread(ranges: torch.Tensor, x_HTD: torch.Tensor, dim: int) -> LayerPair:
    """Floor and step of its group at every place of `x_HTD`, in float32."""
    floor, step = ranges.float().repeat_interleave(GROUP, dim + 1).narrow(dim + 1, 0, x_HTD.shape[dim])
    return floor, step


CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec() for codec in (RawCodec, Int8Codec, Int4Codec)})
