"""Sampling of one sequence beside temperature and top-p: penalties, biases and a grammar, and each draw's log-probability.

Shapes: V words of the vocabulary.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
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
MAX_PATTERN_CHARACTERS = 10_000  # of a schema's patterns with their repetitions written out; ((a{100}){100} has as many
# Of one grammar. A lexer state has 1 to 2 kB. The step fuel is 10 ms of the thread that all requests share.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
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
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _too_complex(self._sampling.grammar.field)
        allowed = np.unpackbits(mask, count=min(words, 8 * len(mask)), bitorder="little").astype(bool)
        return torch.from_numpy(np.pad(allowed, (0, words - len(allowed))))


class Grammar:
    """Grammar of an answer. Immutable; each sequence has a matcher of its own.

    Args:
        matcher: at the start of a text.
        field: of the request, for messages.
    """

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._start, self.field = matcher, field

    def matcher(self) -> LLMatcher:
        """A matcher at the start."""
        return self._start.deep_copy()


class GrammarCompiler:
    """Compiles JSON schemas for one model. Thread-safe; the tokenizer's vocabulary is read at the first use.

    Args:
        model: whose end-of-sequence tokens end an answer.
        tokenizer: the model's fast tokenizer.

    Attributes:
        words: size of the model's vocabulary.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self.words = int(model.config.get_text_config().vocab_size)

    def json(self, schema: Mapping[str, Any] = ANY_OBJECT, field: str = "response_format") -> Grammar:
        """Compile a schema, and compute the mask of the first token: a bad schema costs its own request's thread.

        Args:
            schema: of the JSON.
            field: of the request, for messages.

        Raises:
            InputError: the schema is too long, too deep, too complex, no JSON, or cannot be enforced.
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
        if sum(map(written_out, patterns_of(schema))) > MAX_PATTERN_CHARACTERS:
            raise InputError(
                f"{field}: a pattern repeats too much ({MAX_PATTERN_CHARACTERS} characters in all); make it simpler"
            )
        with self._lock:
            if self._vocabulary is None:
                stop = getattr(self._model.generation_config, "eos_token_id", None)
                ends = [self._tokenizer.eos_token_id] if stop is None else [stop] if isinstance(stop, int) else list(stop)
                words = max(self.words, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=words, eos_token=ends)
        limits = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        except ValueError as error:  # such as NaN, numbers above 1e308, and halves of characters
            why = "it has a number or a text that JSON cannot have"
            raise InputError(f"{field}: this schema cannot be read ({why}: {error}); leave that out of it") from None
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = matcher.get_error().strip().partition("\n")[0][:200]
            raise InputError(f"{field}: this schema cannot be enforced ({why}); leave that out of it")
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _too_complex(field)
        return Grammar(matcher, field)


def _too_complex(field: str) -> InputError:
    return InputError(f"{field}: the answer cannot be held to this schema; make it simpler")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has objects and lists on more than `levels` levels."""
    level = [value]
    for _ in range(levels + 1):
        inner = [one for one in level if isinstance(one, dict | list)]
        if not inner:
            return False
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return True


def patterns_of(schema: Any) -> Iterator[str]:
    """The regular expressions in a schema that is not too deep."""
    for part in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        yield from patterns_of(part)
    if isinstance(schema, dict):
        yield from (value for value in [schema.get("pattern")] if isinstance(value, str))
        yield from (named if isinstance(named := schema.get("patternProperties"), dict) else ())


def written_out(pattern: str) -> int:
    """Characters of a regular expression with its repetitions written out: 12 of `(ab{2}){4}`, for `abbabbabbabb`."""
    groups, last = [0], 0  # size of each open group; of the last character, class or group, which a repetition multiplies
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\s*(\d+)?\s*,?\s*(\d+)?\s*\}|.", pattern, re.DOTALL):
        least, most = token.groups()
        if least or most:
            repeated = last * max(int(number[:9]) for number in (least, most) if number)
            groups[-1] += repeated - last
            last = repeated
        elif token[0] == "(":
            groups.append(0)
        elif token[0] == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif token[0] not in "*+?":
            last = 1
            groups[-1] += last
    return sum(groups)
