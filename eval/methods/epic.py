"""EPIC's LegoLink: the first tokens of every chunk are recomputed, whatever their KV deviation (arXiv 2410.15332)."""

from __future__ import annotations

import math

from cacheblend.blend import ExplicitPositions, FusionConfig, Fusor

from .blend import Blend
from .resident import ResidentRequest


class Epic(Blend):
    """The same positions at every layer, the first one included: the other tokens' KV of layer 0 is loaded.

    Args:
        fusor: the model.
        ratio: share of each chunk that is recomputed from its start, at least one token where it is above 0. EPIC takes a
            fixed count; a share makes it comparable with the other methods at one ratio.
    """

    def __init__(self, fusor: Fusor, ratio: float) -> None:
        super().__init__(fusor, FusionConfig(recompute_ratio=ratio))
        self._ratio = ratio

    def config_for(self, resident: ResidentRequest) -> FusionConfig:
        """The chunks' first tokens."""
        positions: list[int] = []
        start = len(resident.pieces.head)
        for chunk in resident.pieces.chunks:
            positions += range(start, start + math.ceil(self._ratio * len(chunk)))
            start += len(chunk)
        layers = self._fusor.decoder.geometry.layers
        return FusionConfig(recompute_ratio=self._ratio, selector=ExplicitPositions([positions] * layers))
