"""Sampling of one sequence beside temperature and top-p: penalties, biases and a grammar, and each draw's log-probability.

Shapes: V words of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A request's sampling options that `Engine.prepare` does not have; the defaults change nothing.

    Args:
        seed: of the draws; None draws one.
        presence_penalty: subtracted from the logit of each token that the answer contains.
        frequency_penalty: subtracted from a token's logit for each time that the answer contains it.
        repetition_penalty: divides the logits of tokens that prompt or answer contain (multiplies them below 0); 1 for none.
        min_p: tokens less likely than this share of the likeliest token's probability are not drawn.
        logit_bias: added to tokens' logits.
        logprobs: how many of the likeliest tokens are reported with each token; None reports none.
        grammar: of the answer; None for any text.
    """

    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: Grammar | None = None

    def generation_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Add the options that `generate` knows to others."""
        own: dict[str, Any] = {}
        if self.repetition_penalty != 1.0:
            own["repetition_penalty"] = self.repetition_penalty
        if self.min_p and options.get("do_sample"):
            own["min_p"] = self.min_p
        return {**options, **own}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log-probability under the model, before any option, and those of the likeliest tokens."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


class Draws:
    """Applies a request's `Sampling` to the logits of one sequence, token by token.

    Args:
        sampling: the options.
        device: of the logits.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._sampling = sampling
        self._counts = Counter[int]()
        self._matcher = None if sampling.grammar is None else sampling.grammar.matcher()
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._has_penalties = bool(sampling.presence_penalty or sampling.frequency_penalty)

    def adjust(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Apply the options; without any, the result is the same tensor.

        Raises:
            InputError: the grammar's next step exceeds `GRAMMAR_LIMITS`.
        """
        penalised = self._has_penalties and bool(self._counts)
        if not penalised and not len(self._bias_ids) and self._matcher is None:
            return logits_V
        adjusted_V = logits_V.clone()
        if len(self._bias_ids):
            adjusted_V[self._bias_ids] += self._bias
        if penalised:
            ids = torch.tensor(list(self._counts), device=logits_V.device)
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32, device=logits_V.device)
            adjusted_V[ids] -= self._sampling.presence_penalty + self._sampling.frequency_penalty * counts
        if self._matcher is not None:
            adjusted_V[~self._allowed(len(logits_V)).to(logits_V.device)] = -torch.inf
        return adjusted_V

    def accept(self, token_id: int, logits_V: torch.Tensor) -> TokenLogprob | None:
        """Count a drawn token, and return its log-probability if the request asked for it.

        Args:
            token_id: the token.
            logits_V: the model's logits, not adjusted.
        """
        self._counts[token_id] += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        if self._sampling.logprobs is None:
            return None
        logprobs_V = torch.log_softmax(logits_V.float(), dim=-1)
        values, ids = logprobs_V.topk(self._sampling.logprobs)
        likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token_id, float(logprobs_V[token_id]), likeliest)

    def _allowed(self, words: int) -> torch.Tensor:
        """Which tokens the grammar allows now, bool (V,)."""
        assert self._matcher is not None
        assert self._sampling.grammar is not None
        mask = np.frombuffer(self._sampling.grammar.mask(self._matcher), dtype=np.uint8)
        allowed = np.unpackbits(mask, count=min(words, 8 * len(mask)), bitorder="little").astype(bool)
        return torch.from_numpy(np.pad(allowed, (0, words - len(allowed))))
