"""The model's own dtype, bit for bit.

Shapes: H KV heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .chunk import LayerPair
from .codec import EncodedShape, LayerShape


class RawCodec:
    """Stores `(2, H, T, D)`: keys, then values. See `Codec`."""

    name = "raw"

    def encoded_shape(self, layer: LayerShape) -> EncodedShape:
        """See `Codec`."""
        return EncodedShape(layer.dtype, (2, layer.kv_heads, layer.tokens, layer.head_dim))

    def encode(self, layers: Sequence[LayerPair], encoded: torch.Tensor) -> None:
        """See `Codec`. All layers in one operation; see `host_bytes` for what many cost."""
        with torch.no_grad():
            torch.stack(
                [x_HTD if x_HTD.is_cpu else x_HTD.cpu() for pair in layers for x_HTD in pair], out=encoded.flatten(0, 1)
            )

    def decode(self, encoded: torch.Tensor, layer: LayerShape) -> LayerPair:
        """See `Codec`."""
        return encoded[0], encoded[1]
