"""Sampling of one sequence beside temperature and top-p: penalties, biases, a grammar; and the report of each draw.

Shapes: V words of the vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cacheblend.base.errors import InputError
from cacheblend.base.extras import needs_extra

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel

MAX_SCHEMA_CHARACTERS = 2**16
MAX_SCHEMA_DEPTH = 32  # each level is one of the compiler's own stack
# Of one grammar: states are 1 to 2 kB each; a step of so much fuel is some 10 ms of the thread that all requests share.
GRAMMAR_LIMITS: dict[str, Any] = {
    "max_lexer_states": 10_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_grammar_size": 100_000,
}
# Models that are asked for JSON may go on with white space for ever.
JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,8})"}
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A request's options of sampling that `Engine.prepare` has not; the defaults change nothing.

    Args:
        seed: of the draws; None takes one.
        presence_penalty: taken from the logit of each token that the answer has, once.
        frequency_penalty: the same for each time that the answer has it.
        repetition_penalty: logits of tokens that prompt or answer has are divided by it (multiplied below 0); 1 for none.
        min_p: tokens less likely than this share of the likeliest one's probability are not drawn.
        logit_bias: added to tokens' logits.
        logprobs: how many of the likeliest tokens are reported with each token; None: none.
        grammar: what the answer must be; None for any text.
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
        """Options of `generate`, with those of these that it knows."""
        own: dict[str, Any] = {}
        if self.repetition_penalty != 1.0:
            own["repetition_penalty"] = self.repetition_penalty
        if self.min_p and options.get("do_sample"):
            own["min_p"] = self.min_p
        return {**options, **own}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log-probability under the model alone, before any option, and those of the likeliest tokens."""

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
        """The logits to draw from; the very same tensor where nothing was asked for.

        Raises:
            InputError: the grammar has become too much to follow.
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
        """Note the token that was drawn.

        Args:
            token_id: the token.
            logits_V: the model's, not adjusted.

        Returns:
            Its log-probability, where that was asked for.
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
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            assert self._sampling.grammar is not None
            field = self._sampling.grammar.field
            raise InputError(f"{field}: the answer cannot be held to this schema; make it simpler")
        allowed = np.unpackbits(mask, count=min(words, 8 * len(mask)), bitorder="little").astype(bool)
        return torch.from_numpy(np.pad(allowed, (0, words - len(allowed))))


class Grammar:
    """Grammar that an answer follows. Immutable; each sequence has a matcher of its own.

    Args:
        matcher: at the start of a text.
        field: of the request that asked for it.
    """

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._start, self.field = matcher, field

    def matcher(self) -> LLMatcher:
        """A matcher at the start."""
        return self._start.deep_copy()


class GrammarCompiler:
    """Makes grammars of JSON schemas for one model. Thread-safe; what it needs of the tokenizer is made at the first use.

    Args:
        model: whose answers end with its own tokens.
        tokenizer: the model's fast tokenizer.

    Attributes:
        words: of the model's vocabulary.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self.words = int(model.config.get_text_config().vocab_size)

    def json(self, schema: Mapping[str, Any] = ANY_OBJECT, field: str = "response_format") -> Grammar:
        """The grammar of JSON that has a schema.

        Args:
            schema: what the JSON has.
            field: of the request that asked for it; errors name it.

        Raises:
            InputError: the schema is too long, too deep, has what JSON cannot have, or uses what cannot be enforced.
            MissingExtraError: `llguidance` is not installed.
        """
        with needs_extra("structured"):
            import llguidance
            from llguidance.hf import from_tokenizer
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise InputError(f"{field}: a schema has at most {MAX_SCHEMA_CHARACTERS} characters; make it simpler")
        if is_deeper(schema, MAX_SCHEMA_DEPTH):
            raise InputError(f"{field}: a schema is at most {MAX_SCHEMA_DEPTH} levels deep; make it simpler")
        with self._lock:
            if self._vocabulary is None:
                stop = getattr(self._model.generation_config, "eos_token_id", None)
                ends = [self._tokenizer.eos_token_id] if stop is None else [stop] if isinstance(stop, int) else list(stop)
                words = max(self.words, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=words, eos_token=ends)
        limits = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        except ValueError as error:  # NaN, numbers beyond 1e308 and halves of characters are no JSON to it
            why = "it has a number or a text that JSON cannot have"
            raise InputError(f"{field}: this schema cannot be read ({why}: {error}); leave that out of it") from None
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = matcher.get_error().strip().partition("\n")[0][:200]
            raise InputError(f"{field}: this schema cannot be enforced ({why}); leave that out of it")
        return Grammar(matcher, field)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has objects and lists on more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        inner = [one for one in level if isinstance(one, dict | list)]
        if not inner:
            return False
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return True
