"""How near a method's answer is to full recompute's, measured on distributions rather than on finished answers.

Shapes: V vocabulary, G tokens of a given answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cacheblend.blend import FusedPrompt, Fusor
from cacheblend.blend.continuation import branch_cache

GOLD_TOKENS = 64  # of a longer answer (a summary) its beginning is enough, and its forward stays short
COMPARED_TOKENS = 16


def first_token_kl_nats(full_V: torch.Tensor, method_V: torch.Tensor) -> float:
    """KL(full || method) of the answer's first token, in nats, from float32 logits (V,); 0 where they are the same."""
    full, method = (torch.log_softmax(logits_V.double(), dim=-1) for logits_V in (full_V, method_V))
    # Rounding alone may bring it below 0.
    return max(0.0, float(torch.nn.functional.kl_div(method, full, reduction="sum", log_target=True)))


@torch.no_grad()
def answer_nll_nats(fusor: Fusor, fused: FusedPrompt, answer_ids: Sequence[int]) -> float:
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
    """Share of full recompute's first 16 greedy tokens that the method gives too, up to the first that differs; 0..1.

    Tokens after the first difference do not count: they follow other texts.
    """
    wanted = full_ids[:COMPARED_TOKENS]
    equal = 0
    for mine, own in zip(method_ids, wanted, strict=False):
        if mine != own:
            break
        equal += 1
    return equal / len(wanted)
