"""4-bit integers between the smallest and the largest value of a group: keys in groups of tokens a channel, values in groups of
channels a token (KIVI).

Shapes: H KV heads, T tokens, D head size, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .chunk import LayerPair
from .codec import EncodedShape, LayerShape, as_float32, pack, packed_shape, unpack

GROUP = 32
_LARGEST = 15
_HALF_LARGEST = torch.finfo(torch.float16).max
_HALF_TINY = 2.0**-24


class Int4Codec:
    """Stores float16 floor and step of keys `(2, H, G, D)` and values `(2, H, T, G)`, then bytes `(H, T, D)`. See `Codec`.

    A byte holds a key in its low half and a value in its high half. An error is at most half a step, 1/30 of what the group
    spans, and the rounding of the floor to float16.
    """

    name = "int4"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """See `Codec`."""
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        k_HTD, v_HTD = as_float32(self.name, k_HTD, v_HTD, largest=_HALF_LARGEST)
        k_range_2HGD, k_codes_HTD = _quantise(k_HTD, 1)
        v_range_2HTG, v_codes_HTD = _quantise(v_HTD, 2)
        pack((k_range_2HGD, v_range_2HTG, k_codes_HTD | v_codes_HTD << 4), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        k_range_2HGD, v_range_2HTG, codes_HTD = unpack(encoded, self._parts(layer))
        k_HTD = _dequantise(k_range_2HGD, codes_HTD & _LARGEST, 1)
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
    ranges = torch.stack((floor, ((ceiling - floor) / _LARGEST).clamp_(min=_HALF_TINY))).half()
    floor, step = (_spread(part, x_HTD.shape[dim], dim) for part in ranges.float())
    return ranges, ((x_HTD - floor) / step).round_().clamp_(0, _LARGEST).to(torch.uint8)


def _dequantise(ranges: torch.Tensor, codes_HTD: torch.Tensor, dim: int) -> torch.Tensor:
    floor, step = (_spread(part, codes_HTD.shape[dim], dim) for part in ranges.float())
    return codes_HTD * step + floor


def _spread(grouped: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Each group's number at every place of the group."""
    return grouped.repeat_interleave(GROUP, dim).narrow(dim, 0, size)
