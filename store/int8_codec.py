"""8-bit integers: keys with one scale a channel, since some of their channels are large everywhere; values with one a token.

Keys are stored before the rotary embedding, which would mix large channels with small ones (KIVI, KVQuant).

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .chunk import LayerPair
from .codec import EncodedShape, LayerShape, as_float32, pack, packed_shape, unpack

_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class Int8Codec:
    """Stores scales float32 of keys `(H, 1, D)` and values `(H, T, 1)`, then int8 `(2, H, T, D)`. See `Codec`.

    An error is at most 1/254 of the largest value that shares the scale.
    """

    name = "int8"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """See `Codec`."""
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        k_HTD, v_HTD = as_float32(self.name, k_HTD, v_HTD)
        k_scale_H1D = (k_HTD.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=_TINY)
        v_scale_HT1 = (v_HTD.abs().amax(2, keepdim=True) / _LARGEST).clamp_(min=_TINY)
        codes_2HTD = torch.stack((k_HTD / k_scale_H1D, v_HTD / v_scale_HT1)).round_().clamp_(-_LARGEST, _LARGEST)
        pack((k_scale_H1D, v_scale_HT1, codes_2HTD.to(torch.int8)), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        k_scale_H1D, v_scale_HT1, codes_2HTD = unpack(encoded, self._parts(layer))
        return (codes_2HTD[0] * k_scale_H1D).to(layer.dtype), (codes_2HTD[1] * v_scale_HT1).to(layer.dtype)

    def _parts(self, layer: LayerShape) -> tuple[EncodedShape, ...]:
        heads, tokens, dim, _ = layer
        return (
            EncodedShape(torch.float32, (heads, 1, dim)),
            EncodedShape(torch.float32, (heads, tokens, 1)),
            EncodedShape(torch.int8, (2, heads, tokens, dim)),
        )
