"""The check of an unverified family: where blending is exact, it must give the model's own logits and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import UnsupportedModelError

from .prompt import Segment
from .selection import FusionConfig

if TYPE_CHECKING:
    from .fusor import Fusor


def check_against_model(fusor: Fusor, family: str) -> None:
    """Blend where that is exact (at ratio 1.0, and with a chunk that stands first) and compare with full prefill.

    Raises:
        UnsupportedModelError: the results differ by more than rounding, or the model cannot be run layer by layer.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(fusor.runner.vocab_size, (48,), generator=generator).tolist()
    first, second, last = ids[:16], ids[16:32], ids[32:]
    try:
        chunks = fusor.precompute(first), fusor.precompute(second)
        all_fresh = [Segment(first, chunks[0]), Segment(second, chunks[1]), Segment(last)]
        half_fresh = [Segment(first, chunks[0]), Segment(second), Segment(last)]
        reference = fusor.prefill(ids).logits
        got = [
            fusor.fuse(all_fresh, FusionConfig(recompute_ratio=1.0)),
            fusor.fuse(half_fresh, FusionConfig(recompute_ratio=0.5)),
        ]
    except (RuntimeError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(f"{family} models do not run layer by layer: {error}") from error
    off = max(float((fused.logits - reference).abs().max()) for fused in got)
    off = max(off, _stored_keys_off(fusor, first, second))
    allowed = (1e-4 if fusor.runner.geometry.dtype == torch.float32 else 2e-2) * max(1.0, float(reference.abs().max()))
    if not off <= allowed:
        raise UnsupportedModelError(
            f"{family} is not a verified family, and where blending must be exact its logits are off by {off:.3g} "
            f"(allowed: {allowed:.3g}); it needs support of its own"
        )


def _stored_keys_off(fusor: Fusor, prefix: list[int], chunk: list[int]) -> float:
    """How far a chunk's stored keys, put after their own prefix, are from full prefill's, relative to the largest key."""
    stored = Segment(chunk, fusor.precompute(chunk, prefix))
    reused: Any = fusor.fuse([Segment(prefix), stored, Segment(prefix[:1])], FusionConfig(recompute_ratio=0)).cache
    full: Any = fusor.prefill([*prefix, *chunk, *prefix[:1]]).cache
    off = 0.0
    for mine, own in zip(reused.layers, full.layers, strict=True):
        keys = [layer.keys[:, :, -len(chunk) - 1 : -1] for layer in (mine, own)]
        off = max(off, float((keys[0] - keys[1]).abs().max() / keys[1].abs().max()))
    return off
