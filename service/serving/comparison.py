"""How far a blended prompt's answer is from full prefill's."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend.blend import FusionResult, Fusor, NextToken, SequenceKV
from cacheblend.blend.deviation import equal_tokens_share, first_token_kl_nats, relative_kv_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A blended prompt beside the same prompt prefilled in full.

    Args:
        agreement: share of full prefill's first greedy tokens that blending gives too, before the first that differs, 0..1.
        first_token_kl_nats: Kullback-Leibler divergence of the first token's distribution, full from blended.
        relative_kv_error: squared difference of the prompt's KV over its squared size; 0 is none left (paper §4.1).
        recompute_ratio: that the blended prompt ran at.
    """

    agreement: float
    first_token_kl_nats: float
    relative_kv_error: float
    recompute_ratio: float

    @property
    def first_token_kl(self) -> float:
        """`first_token_kl_nats` by its older name."""
        return self.first_token_kl_nats


def first_tokens(
    fusor: Fusor, prompts: Sequence[FusionResult], tokens: int, greedy: Mapping[str, Any]
) -> Generator[None, None, list[list[int]]]:
    """Each prompt's first greedy tokens, all of them a token a step; the prompts' caches stay as they are.

    Args:
        fusor: the model.
        prompts: prefilled.
        tokens: at most so many each.
        greedy: see `NextToken`; no sampling.
    """
    drawn = [NextToken(fusor.model, fused.token_ids, tokens, **greedy) for fused in prompts]
    kv = [SequenceKV(fused, fusor.decoder.windows) for fused in prompts]
    for own, fused in zip(drawn, prompts, strict=True):
        own.draw(fused.logits)
    while running := [index for index, own in enumerate(drawn) if own.finish_reason is None]:
        yield
        logits_RV = fusor.decoder.decode([drawn[index].token_ids[-1] for index in running], [kv[index] for index in running])
        for index, logits_V in zip(running, logits_RV, strict=True):
            drawn[index].draw(logits_V)
    return [own.token_ids for own in drawn]


def compare(
    full: FusionResult, full_tokens: Sequence[int], blended: FusionResult, blended_tokens: Sequence[int], recompute_ratio: float
) -> Comparison:
    """Hold a blended prompt against full prefill.

    Args:
        full: prefilled in full.
        full_tokens: its first greedy tokens, at least one; they end with the end of sequence where that came.
        blended: the same prompt, blended.
        blended_tokens: its first greedy tokens, no fewer unless it ended.
        recompute_ratio: that it ran at.
    """
    return Comparison(
        agreement=equal_tokens_share(full_tokens, blended_tokens),
        first_token_kl_nats=first_token_kl_nats(full.logits, blended.logits),
        relative_kv_error=relative_kv_error(blended.cache, full.cache),
        recompute_ratio=recompute_ratio,
    )
