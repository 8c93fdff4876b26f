"""Fidelity to full prefill: of a blended prompt's KV, first token and greedy tokens; and the check of an unverified family."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cacheblend.base.errors import UnsupportedModelError

from .config import FusionConfig
from .generation import NextToken, SequenceKV
from .prompt import FusionResult, Segment

if TYPE_CHECKING:
    from transformers import DynamicCache

    from .fusor import Fusor


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A blended prompt beside full prefill; `agreement` is `equal_tokens_share`, the others are their functions."""

    agreement: float
    first_token_kl_nats: float
    relative_kv_error: float


def compare_steps(
    fusor: Fusor, full: FusionResult, blended: FusionResult, tokens: int, greedy: dict[str, Any]
) -> Generator[None, None, Comparison]:
    """Compare two prefills of a prompt, and up to `tokens` greedy tokens after each, a token of both a step.

    Their caches do not change. `greedy` are the options of sampling, for `NextToken`.
    """
    prompts = full, blended
    drawn = [NextToken(fusor.model, fused.token_ids, tokens, **greedy) for fused in prompts]
    kv = [SequenceKV(fused, fusor.decoder.windows) for fused in prompts]
    for own, fused in zip(drawn, prompts, strict=True):
        own.draw(fused.logits)
    while running := [index for index, own in enumerate(drawn) if own.finish_reason is None]:
        yield None
        logits_RV = fusor.decoder.decode([drawn[index].token_ids[-1] for index in running], [kv[index] for index in running])
        for index, logits_V in zip(running, logits_RV, strict=True):
            drawn[index].draw(logits_V)
    return Comparison(
        agreement=equal_tokens_share(*(own.token_ids for own in drawn)),
        first_token_kl_nats=first_token_kl_nats(full.logits, blended.logits),
        relative_kv_error=relative_kv_error(blended.cache, full.cache),
    )


def relative_kv_error(cache: DynamicCache, full: DynamicCache) -> float:
    """Squared difference of all keys and values over the squared size of full recompute's; 0 if they are equal.

    Sums run over layers, heads, tokens and head size, in float32; relative, so that models can be compared. Layers with a
    sliding window are compared within it.
    """
    difference = size = 0.0
    for layer, full_layer in kept_pairs(cache, full):
        for x, y in ((layer.keys, full_layer.keys), (layer.values, full_layer.values)):
            difference += float((x.float() - y.float()).square().sum())
            size += float(y.float().square().sum())
    return difference / size


def kept_pairs(cache: Any, full: Any) -> Iterator[tuple[Any, Any]]:
    """The layers of two caches side by side; those that keep nothing are left out."""
    return zip(*([layer for layer in own.layers if layer.keys is not None] for own in (cache, full)), strict=True)


def first_token_kl_nats(full_V: torch.Tensor, blended_V: torch.Tensor) -> float:
    """KL(full || blended) of the answer's first token, in nats, from float32 logits (V,); 0 if they are equal."""
    full, blended = (torch.log_softmax(logits_V.double(), dim=-1) for logits_V in (full_V, blended_V))
    # Rounding could make it negative.
    return max(0.0, float(torch.nn.functional.kl_div(blended, full, reduction="sum", log_target=True)))


def equal_tokens_share(full_ids: Sequence[int], blended_ids: Sequence[int]) -> float:
    """Share of full prefill's greedy tokens that blending draws too, up to the first that differs; 0..1.

    Tokens after the first difference do not count: they follow different texts.

    Args:
        full_ids: at least one; the end of sequence is the last one if it came.
        blended_ids: no fewer unless they ended.
    """
    differs = [one != other for one, other in zip(full_ids, blended_ids, strict=False)]
    return (differs.index(True) if True in differs else len(differs)) / len(full_ids)


def check_against_model(fusor: Fusor, family: str) -> None:
    """Blend an unverified family where that is exact, and compare with full prefill.

    That is at ratio 1.0, with a chunk that stands first, and with one after its own prefix.

    Raises:
        UnsupportedModelError: the results differ by more than rounding, or the model cannot be run layer by layer.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(fusor.runner.vocab_size, (48,), generator=generator).tolist()
    first, second, last = ids[:16], ids[16:32], ids[32:]
    try:
        stored, own, after = fusor.precompute(first), fusor.precompute(second), fusor.precompute(second, first)
        full = fusor.prefill(ids)
        exact = (
            fusor.fuse([Segment(first, stored), Segment(second, own), Segment(last)], FusionConfig(recompute_ratio=1.0)),
            fusor.fuse([Segment(first, stored), Segment(second), Segment(last)], FusionConfig(recompute_ratio=0.5)),
        )
        reused: Any = fusor.fuse([Segment(first), Segment(second, after), Segment(last)], FusionConfig(recompute_ratio=0)).cache
    except (RuntimeError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise UnsupportedModelError(f"{family} models do not run layer by layer: {error}") from error
    off = max(float((fused.logits - full.logits).abs().max()) for fused in exact)
    for layer, own_layer in kept_pairs(reused, full.cache):
        off = max(off, float((layer.keys - own_layer.keys).abs().max() / own_layer.keys.abs().max()))
    allowed = (1e-4 if fusor.runner.geometry.dtype == torch.float32 else 2e-2) * max(1.0, float(full.logits.abs().max()))
    if not off <= allowed:
        raise UnsupportedModelError(
            f"{family} is not a verified family, and where blending must be exact its logits are off by {off:.3g} "
            f"(allowed: {allowed:.3g}); it needs support of its own"
        )
