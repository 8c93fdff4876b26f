"""How far a prompt's KV is from full recompute's after a method has run (paper §4.1)."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache


def deviation_left(cache: DynamicCache, full: DynamicCache) -> float:
    """Squared difference of all keys and values over the squared size of full recompute's: 0 is none left.

    Sums run over layers, heads, tokens and head size, in float32; relative, so that models can be compared. Layers with a
    sliding window are compared within it.
    """
    difference = size = 0.0
    ours: list[Any] = cache.layers
    theirs: list[Any] = full.layers
    for mine, own in zip(ours, theirs, strict=True):
        for x, y in ((mine.keys, own.keys), (mine.values, own.values)):
            # Generation appends to copies of the layers or behind them, never to these tensors.
            difference += float((x.float() - y.float()).square().sum())
            size += float(y.float().square().sum())
    return difference / size
