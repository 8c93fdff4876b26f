"""Grammars of JSON schemas, which an answer follows token by token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import InputError, needs_extra

from .reasoning import Thoughts

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel

# Of one grammar. A lexer state has 1 to 2 kB. The step fuel is 10 ms of the thread that all requests share.
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 10_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_grammar_size": 100_000,
}
TRIAL_S, TRIAL_BYTES = 0.3, 2**30  # of processor time and of memory, for a process that compiles a grammar for trial
_TRIAL = f"""
import resource, signal, sys
import llguidance
resource.setrlimit(resource.RLIMIT_AS, ({TRIAL_BYTES}, {TRIAL_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.setitimer(signal.ITIMER_PROF, {TRIAL_S})
limits = llguidance.LLParserLimits(verbose_errors=False, **{GRAMMAR_LIMITS})
matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
matcher.is_error() or matcher.compute_bitmask()
"""
_trials = threading.Lock()
# Models that are asked for JSON may go on with white space for ever.
JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n {0,8})"}
LENIENT = {"lenient": True}  # of a schema's "x-guidance": the compiler leaves out keywords that it cannot enforce
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # in a pattern, what it cannot enforce; it leaves no patterns out


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

    def mask(self, matcher: LLMatcher) -> bytes:
        """Which tokens may be next, a bit each.

        Raises:
            InputError: the next token exceeds `GRAMMAR_LIMITS`.
        """
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise InputError(f"{self.field}: the answer cannot be held to this schema; make it simpler")
        return mask


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
        self.words = int(model.config.get_text_config().vocab_size)

    def json(self, *schemas: Mapping[str, Any], field: str = "response_format", thoughts: Thoughts | None = None) -> Grammar:
        """Compile schemas, and compute the mask of the first token: a bad schema costs its own request's thread.

        Args:
            schemas: the JSON has one of them.
            field: of the request, for messages.
            thoughts: that come before the JSON.

        Raises:
            InputError: the schema is too complex, no JSON, or cannot be enforced.
            MissingExtraError: `llguidance` is not installed.
        """
        with needs_extra("structured"):
            import llguidance
        limits, vocabulary = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS), self._vocabulary
        ways = [{**one, "x-guidance": {**JSON_OPTIONS, "lenient": one.get("x-guidance") == LENIENT}} for one in schemas]
        answer = "answer: " + " | ".join(f"%json {json.dumps(way)}" for way in ways)
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: answer\n{answer}")
        if not is_bounded(grammar):
            why = f"this schema is not compiled within {TRIAL_S} s of a processor; make it simpler, or its numbers smaller"
            raise InputError(f"{field}: {why}")
        if thoughts is not None and (before := thoughts.grammar(vocabulary.is_special_token)):
            grammar = llguidance.LLMatcher.grammar_from_lark(before + answer)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = " ".join(matcher.get_error().rpartition("JSON schema: ")[2].partition("\n   1 | ")[0].split())[:200]
            raise InputError(f"{field}: this schema cannot be enforced ({why}); leave that out of it")
        made = Grammar(matcher, field)
        made.mask(made.matcher())
        return made

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        stop = getattr(self._model.generation_config, "eos_token_id", None)
        ends = [self._tokenizer.eos_token_id] if stop is None else [stop] if isinstance(stop, int) else list(stop)
        words = max(self.words, len(self._tokenizer))
        return from_tokenizer(self._tokenizer, n_vocab=words, eos_token=ends)


@lru_cache(maxsize=32)
def is_bounded(grammar: str) -> bool:
    """Whether another process compiles a grammar within `TRIAL_S` and `TRIAL_BYTES`, or finds its error, and does not crash.

    The compiler bounds neither: `multipleOf` a number of eight digits, or an intersection of 20 patterns, takes minutes and
    gigabytes, in which no other thread runs; at an integer of -2**63 its stack overflows, which ends the process.
    """
    with _trials:  # one at a time
        done = subprocess.run([sys.executable, "-P", "-c", _TRIAL], input=grammar.encode(), capture_output=True, check=False)
    return done.returncode == 0


def call_schema(name: str, parameters: Mapping[str, Any] | None, *, is_strict: bool) -> dict[str, Any]:
    """The JSON schema of a function's call; one that is not strict is not held to what the compiler cannot enforce.

    Args:
        name: of the function.
        parameters: the schema of its arguments; None for a function without any.
        is_strict: whether such a schema is refused, by `GrammarCompiler.json`.
    """
    arguments = {"type": "object", **({"additionalProperties": False} if parameters is None else parameters)}
    properties = {"name": {"const": name}, "arguments": _as_part(arguments, "#/properties/arguments", is_strict)}
    call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return call if is_strict else {**call, "x-guidance": LENIENT}


def answer_schema(schema: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """The JSON schema of an answer; one that is not strict is not held to what the compiler cannot enforce."""
    return {**schema} if is_strict else {**_as_part(schema, "#", is_strict), "x-guidance": LENIENT}


def _as_part(schema: Any, place: str, is_strict: bool) -> Any:
    """A schema as a part of another: what its references name begins at its place there."""
    if isinstance(schema, list):
        return [_as_part(part, place, is_strict) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _as_part(value, place, is_strict) for key, value in schema.items()}
    if isinstance(to := schema.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = place + to[1:]
    if not is_strict and isinstance(pattern := schema.get("pattern"), str) and LOOKS_AROUND.search(pattern):
        del moved["pattern"]
    return moved
