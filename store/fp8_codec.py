"""8-bit floats, E4M3: 3 bits of mantissa, one scale a head.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .chunk import LayerPair
from .codec import EncodedShape, LayerShape, as_float32, pack, packed_shape, unpack

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_TINY = torch.finfo(torch.float32).tiny


class Fp8Codec:
    """Stores scales float32 `(2, H)`, then values float8 `(2, H, T, D)`: keys, then values. See `Codec`.

    A value keeps a relative error of at most 2**-4; one below 2**-14 of its head's largest, an absolute one of
    2**-18 of that.
    """

    name = "fp8_e4m3"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return packed_shape(self._parts(layer))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """See `Codec`."""
        for (k_HTD, v_HTD), layer in zip(layers, encoded, strict=True):
            self._encode(k_HTD, v_HTD, layer)

    def _encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        x_2HTD = torch.stack(as_float32(self.name, k_HTD, v_HTD))
        scale_2H = (x_2HTD.abs().amax((2, 3)) / _LARGEST).clamp_(min=_TINY)
        # Clamped: a value that rounding puts above the largest would become NaN.
        codes_2HTD = (x_2HTD / scale_2H[:, :, None, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        pack((scale_2H, codes_2HTD), encoded)

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        scale_2H, codes_2HTD = unpack(encoded, self._parts(layer))
        k_HTD, v_HTD = codes_2HTD.float().mul_(scale_2H[:, :, None, None]).to(layer.dtype)
        return k_HTD, v_HTD

    def _parts(self, layer: LayerShape) -> tuple[EncodedShape, ...]:
        heads, tokens, dim, _ = layer
        return EncodedShape(torch.float32, (2, heads)), EncodedShape(torch.float8_e4m3fn, (2, heads, tokens, dim))
