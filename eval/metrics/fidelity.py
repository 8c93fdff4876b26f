"""Nearness of a method's answers to full recompute's, measured on distributions rather than on finished answers.

Shapes: V vocabulary, G tokens of a given answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cacheblend.blend import FusionResult, Fusor
from cacheblend.blend.fidelity import equal_tokens_share
from cacheblend.blend.generation import branch_cache

GOLD_TOKENS = 64  # of a longer answer (a summary) its beginning is enough, and its forward stays short
COMPARED_TOKENS = 16


@torch.no_grad()
def answer_nll_nats(fusor: Fusor, fused: FusionResult, answer_ids: Sequence[int]) -> float:
    """Negative log-likelihood of an answer after a prompt, summed over its tokens, by teacher forcing.

    The first token is marked by the prompt's own logits, the others by one forward over a branch of its cache, which stays as
    it is.

    Args:
        fusor: the model.
        fused: the prompt.
        answer_ids: G token ids, at least one.
    """
    logits_GV = fused.logits[None]
    if len(answer_ids) > 1:
        ids = torch.tensor([list(answer_ids[:-1])], device=fusor.decoder.device)
        output: Any = fusor.model(ids, past_key_values=branch_cache(fused.cache), use_cache=True)
        logits_GV = torch.cat([logits_GV, output.logits[0].float()])
    wanted_G1 = torch.tensor(answer_ids, device=logits_GV.device)[:, None]
    return -float(torch.log_softmax(logits_GV.double(), dim=-1).gather(1, wanted_G1).sum())


def equal_greedy_tokens(full_ids: Sequence[int], method_ids: Sequence[int]) -> float:
    """Share of full recompute's first 16 greedy tokens that the method gives too, see `equal_tokens_share`."""
    return equal_tokens_share(full_ids[:COMPARED_TOKENS], method_ids)


CONFIDENCE = 0.95
RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500  # bounds memory at 1,000 cases to 4 MB


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the paired differences and the bounds of its 95 % interval; None where one pair alone gives no interval."""

    mean: float
    low: float | None
    high: float | None


def paired_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Difference:
    """`ours` minus `theirs`, case by case, by a percentile bootstrap over cases; the same arguments give the same interval.

    Done with numpy: scipy's `bootstrap` is the same for a mean, and its import takes longer than a small run's report.
    """
    differences_N = np.subtract(ours, theirs)
    mean = float(differences_N.mean())
    if len(differences_N) < 2:
        return Difference(mean, None, None)
    rng = np.random.default_rng(seed)
    means = [
        rng.choice(differences_N, size=(_RESAMPLES_AT_ONCE, len(differences_N))).mean(axis=1)
        for _ in range(RESAMPLES // _RESAMPLES_AT_ONCE)
    ]
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), [outside, 100 - outside])
    return Difference(mean, float(low), float(high))
