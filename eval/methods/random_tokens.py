"""The control: as many tokens as blending recomputes, chosen at random."""

from __future__ import annotations

import random

from cacheblend.blend import ExplicitPositions, FusionConfig, Fusor

from .blend import Blend
from .resident import ResidentRequest


class RandomTokens(Blend):
    """Everything as in blending, only the choice is chance: layer 0 runs whole and layer 1's fresh K and V are kept.

    Args:
        fusor: the model.
        ratio: share of the reusable tokens that layers 1 and up recompute.
    """

    def __init__(self, fusor: Fusor, ratio: float) -> None:
        super().__init__(fusor, FusionConfig(recompute_ratio=ratio))
        self._ratio = ratio

    def config_for(self, resident: ResidentRequest) -> FusionConfig:
        """Positions drawn by the request's id; at ratio 0 none, layer 0's neither, as in blending."""
        if self._ratio == 0:
            return FusionConfig(recompute_ratio=0)
        reusable: list[int] = []
        start = len(resident.pieces.head)
        for chunk, kv in zip(resident.pieces.chunks, resident.chunk_kv, strict=True):
            if kv is not None:
                reusable += range(start, start + len(chunk))
            start += len(chunk)
        rng = random.Random(f"random_tokens/{resident.request.example.id}")
        chosen = rng.sample(reusable, round(self._ratio * len(reusable)))
        later = self._fusor.decoder.geometry.layers - 1
        return FusionConfig(recompute_ratio=self._ratio, selector=ExplicitPositions([reusable, *[chosen] * later]))
