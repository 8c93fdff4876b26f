"""Grammars of JSON schemas: one that is too complex is refused before it costs anybody's time."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend.base.errors import InputError
from cacheblend.service import Engine
from cacheblend.service.engine.grammar import GrammarCompiler, written_out


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("abc", 3),
        ("(ab{2}){4}", 12),
        ("a{2}{3}", 6),
        ("a*{3}", 3),
        ("a{2,5}b{3,}c{,4}", 12),
        ("a{ 2 , 5 }", 5),
        (r"[(a{9}\]]{3}\{9}", 6),
        (")a{2}(", 3),
        ("((a{1000}){1000}){1000}", 10**9),
        ("a{" + "9" * 5000 + "}", 999_999_999),
        ("{" + " " * 9000, 9001),  # long ones without an end: backtracking over them would outlast the test
        ("{" + "1" * 9000, 9001),
        ("[" * 9000, 1),
    ],
)
def test_written_out(pattern: str, characters: int) -> None:
    """Nested repetitions multiply, those one after the other add up; classes and escapes are one character."""
    assert written_out(pattern) == characters


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
        {"type": "object", "patternProperties": {"(a{200}){200}": {"type": "string"}}},
        {"anyOf": [{"type": "string", "pattern": f"{letter}{{6000}}"} for letter in "ab"]},
    ],
)
def test_patterns_that_repeat_too_much_are_refused(engine: Engine, schema: dict[str, Any]) -> None:
    """Wherever they stand in the schema, and however they are nested."""
    pytest.importorskip("llguidance")
    with pytest.raises(InputError, match="pattern repeats too much"):
        GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99999989},
        {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]},
    ],
)
def test_schemas_that_take_minutes_and_gigabytes_are_refused(engine: Engine, schema: dict[str, Any]) -> None:
    """Another process tries them, within bounds of its own."""
    pytest.importorskip("llguidance")
    with pytest.raises(InputError, match="to compile; make it simpler"):
        GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json({"properties": {"a": schema}})


@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 5, 2**64, -1e300])
@pytest.mark.parametrize("keyword", ["const", "enum", "minimum"])
def test_numbers_at_which_the_compiler_crashes_are_refused(engine: Engine, keyword: str, number: float) -> None:
    """Fuzzing ended the process by `{"enum": [-9223372036854775808]}`."""
    pytest.importorskip("llguidance")
    schema = {"type": "integer", keyword: [number] if keyword == "enum" else number, "maximum": 5}
    with pytest.raises(InputError, match=r"at most 10\*\*18"):
        GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json({"properties": {"a": schema}})


def test_an_ordinary_pattern(engine: Engine) -> None:
    """A pattern of a date has a grammar, whose first mask is there."""
    pytest.importorskip("llguidance")
    schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
    grammar = GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json(schema)
    assert any(grammar.matcher().compute_bitmask())
