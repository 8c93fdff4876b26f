"""The model's own dtype, bit for bit.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

import torch

from .chunk import LayerPair
from .codec import EncodedShape, LayerShape


class RawCodec:
    """Stores `(2, H, T, D)`: keys, then values. See `Codec`."""

    name = "raw"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return EncodedShape(layer.dtype, (2, layer.kv_heads, layer.tokens, layer.head_dim))

    def encode(self, k_HTD: torch.Tensor, v_HTD: torch.Tensor, encoded: torch.Tensor) -> None:
        """See `Codec`."""
        encoded[0].copy_(k_HTD.detach())
        encoded[1].copy_(v_HTD.detach())

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        return encoded[0], encoded[1]
