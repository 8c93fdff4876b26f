"""Grammars of JSON schemas: one that is too complex is refused before it costs anybody's time."""

from typing import Any

import pytest

from cacheblend.base.errors import InputError
from cacheblend.service import Engine
from cacheblend.service.engine.grammar import GrammarCompiler

LETTERS = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99999989},
        {"allOf": LETTERS},
        {"type": "integer", "enum": [-(2**63)]},
        {"type": "integer", "const": -(2**63) + 5},
    ],
)
def test_schemas_that_take_minutes_and_gigabytes_are_refused(engine: Engine, schema: dict[str, Any]) -> None:
    """Another process tries them, within bounds of its own: the compiler itself has none, and may crash."""
    pytest.importorskip("llguidance")
    with pytest.raises(InputError, match="is not compiled within"):
        GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json(schema)


def test_an_ordinary_pattern(engine: Engine) -> None:
    """A pattern of a date has a grammar, whose first mask is there."""
    pytest.importorskip("llguidance")
    schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
    grammar = GrammarCompiler(engine.fusor.model, engine.fusor.tokenizer).json(schema)
    assert any(grammar.matcher().compute_bitmask())
