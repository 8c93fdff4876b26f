"""Grammars of JSON schemas, which an answer follows token by token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cacheblend.base.errors import InputError, needs_extra

from .reasoning import Thoughts

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel

MAX_SCHEMA_CHARACTERS = 2**16
MAX_SCHEMA_DEPTH = 32  # each level is one of the compiler's own stack
MAX_PATTERN_CHARACTERS = 10_000  # of a schema's patterns with their repetitions written out; ((a{100}){100} has as many
MAX_NUMBER = 10**18  # at -2**63 the compiler's own stack overflows, which ends the process
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
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self.words = int(model.config.get_text_config().vocab_size)

    def json(self, *schemas: Mapping[str, Any], field: str = "response_format", thoughts: Thoughts | None = None) -> Grammar:
        """Compile schemas, and compute the mask of the first token: a bad schema costs its own request's thread.

        Args:
            schemas: the JSON has one of them; without any it is an object.
            field: of the request, for messages.
            thoughts: that come before the JSON.

        Raises:
            InputError: the schema is too long, too deep, too complex, no JSON, or cannot be enforced.
            MissingExtraError: `llguidance` is not installed.
        """
        with needs_extra("structured"):
            import llguidance
        schemas = schemas or ({"type": "object"},)
        text = json.dumps(schemas)
        if len(text) > MAX_SCHEMA_CHARACTERS:
            raise InputError(f"{field}: a schema has at most {MAX_SCHEMA_CHARACTERS} characters; make it simpler")
        if any(is_deeper(schema, MAX_SCHEMA_DEPTH) for schema in schemas):
            raise InputError(f"{field}: a schema is at most {MAX_SCHEMA_DEPTH} levels deep; make it simpler")

        def bound(number: str) -> None:
            if abs(float(number)) > MAX_NUMBER:
                raise InputError(f"{field}: a number of a schema is at most 10**18; leave {number[:40]} out of it")

        json.loads(text, parse_int=bound, parse_float=bound)
        patterns = list(patterns_of([*schemas]))
        # The length first: to read a long pattern costs more than its length.
        if sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS or sum(map(written_out, patterns)) > MAX_PATTERN_CHARACTERS:
            raise InputError(f"{field}: a pattern repeats too much ({MAX_PATTERN_CHARACTERS} characters in all); simplify it")
        limits, vocabulary = llguidance.LLParserLimits(verbose_errors=False, **GRAMMAR_LIMITS), self._read_vocabulary()
        ways = [{**one, "x-guidance": {**JSON_OPTIONS, "lenient": one.get("x-guidance") == LENIENT}} for one in schemas]
        answer = "answer: " + " | ".join(f"%json {json.dumps(way)}" for way in ways)
        grammar = llguidance.LLMatcher.grammar_from_lark(f"start: answer\n{answer}")
        if not is_bounded(grammar):
            raise InputError(f"{field}: this schema takes more than {TRIAL_S} s of a processor to compile; make it simpler")
        if thoughts is not None and (before := thoughts.grammar(vocabulary.is_special_token)):
            grammar = llguidance.LLMatcher.grammar_from_lark(before + answer)
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = " ".join(matcher.get_error().rpartition("JSON schema: ")[2].partition("<state>")[0].split())[:200]
            raise InputError(f"{field}: this schema cannot be enforced ({why}); leave that out of it")
        made = Grammar(matcher, field)
        made.mask(made.matcher())
        return made

    def _read_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                stop = getattr(self._model.generation_config, "eos_token_id", None)
                ends = [self._tokenizer.eos_token_id] if stop is None else [stop] if isinstance(stop, int) else list(stop)
                words = max(self.words, len(self._tokenizer))
                self._vocabulary = from_tokenizer(self._tokenizer, n_vocab=words, eos_token=ends)
            return self._vocabulary


@lru_cache(maxsize=256)
def is_bounded(grammar: str) -> bool:
    """Whether another process compiles a grammar within `TRIAL_S` and `TRIAL_BYTES`, or finds its error, and does not crash.

    The compiler bounds neither: `multipleOf` a number of eight digits, or an intersection of 20 patterns, takes minutes and
    gigabytes, in which no other thread runs.
    """
    with _trials:  # one at a time
        done = subprocess.run([sys.executable, "-c", _TRIAL], input=grammar.encode(), capture_output=True, check=False)
    return done.returncode == 0


def call_schema(name: str, parameters: Mapping[str, Any] | None, *, is_strict: bool) -> dict[str, Any]:
    """The JSON schema of a function's call; one that is not strict is not held to what the compiler cannot enforce.

    Args:
        name: of the function.
        parameters: the schema of its arguments; None for a function without any.
        is_strict: whether such a schema is refused, by `GrammarCompiler.json`.
    """
    arguments = {"type": "object", "additionalProperties": False} if parameters is None else parameters
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
    # Possessive: with backtracking "{" and 600 spaces take seconds, in which no other thread runs.
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{\s*+(\d++)?\s*+,?\s*+(\d++)?\s*+\}|.", pattern, re.DOTALL):
        low, high = token.groups()
        if token[0] == "(":
            groups.append(0)
            continue
        if token[0] in "*+?":
            continue
        if low or high:
            repeated = last * max(int(number[:9]) for number in (low, high) if number)
            groups[-1] += repeated - last
            last = repeated
        else:
            last = groups.pop() if token[0] == ")" and len(groups) > 1 else 1
            groups[-1] += last
    return sum(groups)
