"""When each layer of a request is loaded and computed, given how long each takes (paper figure 10a)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A request's layers on one clock, loading beside computing.

    Args:
        total_s: from the start to the end of the last layer.
        loaded_s: when the last layer's KV is there.
        waits_for_last: the fusor is at the last layer before its KV is: loading is the longer side.
    """

    total_s: float
    loaded_s: float
    waits_for_last: bool

    @classmethod
    def of(cls, load_s: Sequence[float], compute_s: Sequence[float], lookahead_layers: int) -> Pipeline:
        """Walk through the layers.

        Args:
            load_s: seconds to load each layer.
            compute_s: seconds to compute it once it is there.
            lookahead_layers: how many layers may be there that the fusor has not taken yet.
        """
        loaded, done = 0.0, 0.0
        taken: list[float] = []
        waits = False
        for layer, (load, compute) in enumerate(zip(load_s, compute_s, strict=True)):
            has_room = taken[layer - lookahead_layers] if layer >= lookahead_layers else 0.0
            loaded = max(loaded, has_room) + load
            waits = load > 0 and loaded > done
            taken.append(max(loaded, done))
            done = taken[-1] + compute
        return cls(done, loaded, waits)
