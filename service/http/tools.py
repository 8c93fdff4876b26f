"""Tools that a chat may call: their bounds, the schema of a call that must come, and calls found in an answer's text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..serving.grammar import is_deeper

OPENS, CLOSES = "<tool_call>", "</tool_call>"  # as Hermes and Qwen write calls
MAX_TOOLS = 32
MAX_TOOL_CHARACTERS = 2**16  # of all tools of a request as JSON, and of one call's arguments
MAX_TOOL_DEPTH = 32  # levels of the same


def check_bounds(value: Any) -> None:
    """Refuse JSON that is too long, too deep, or has text that is no Unicode or a number that is not finite.

    Raises:
        ValueError: it does; the message says what is allowed.
    """
    if is_deeper(value, MAX_TOOL_DEPTH):
        raise ValueError(f"is more than {MAX_TOOL_DEPTH} levels deep; make it simpler")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not Unicode: {error.reason}") from None
    except ValueError:
        raise ValueError("has NaN or a number beyond 1e308, which JSON has not; leave it out") from None
    if len(text) > MAX_TOOL_CHARACTERS:
        raise ValueError(f"has more than {MAX_TOOL_CHARACTERS} characters as JSON; make it shorter")


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments from their JSON.

    Raises:
        ValueError: it is not the JSON of an object, or outside the bounds.
    """
    if len(text) > MAX_TOOL_CHARACTERS:
        raise ValueError(f"has more than {MAX_TOOL_CHARACTERS} characters; make it shorter")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError("must be the JSON of an object, as the service gave it") from None
    if not isinstance(value, dict):
        raise ValueError("must be the JSON of an object, as the service gave it")
    check_bounds(value)
    return value


def call_schema(functions: Sequence[tuple[str, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """The JSON schema of a call of one of the functions.

    Args:
        functions: names, and schemas of their arguments; None for a function without arguments.
    """
    calls = []
    for place, (name, parameters) in enumerate(functions):
        arguments = {"type": "object", "additionalProperties": False} if parameters is None else parameters
        properties = {"name": {"const": name}, "arguments": _moved(arguments, f"#/anyOf/{place}/properties/arguments")}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "arguments"], "additionalProperties": False}
        )
    return {"anyOf": calls}


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another one: what its references name begins at its place there."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


class CallReader:
    """Finds the calls in one answer's text as it comes.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or an answer that is only such an object, as a model
    writes it that is held to one. Text is held back from where a call may begin. What is no complete call of one of the
    tools stays text.

    Args:
        names: of the tools; without any all is text.
        max_calls: calls that are taken; what comes after is dropped.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        self._names, self._max_calls = frozenset(names), max_calls
        self._held: list[str] = []
        self._holds_all = self._has_given = False

    def add(self, text: str) -> str:
        """The text that is certain not to be a call, with this piece of the answer."""
        if not self._names:
            return text
        self._held.append(text)
        if self._holds_all:
            return ""
        held = "".join(self._held)
        start = held.find(OPENS)
        self._holds_all = start >= 0 or (not self._has_given and held.lstrip().startswith("{"))
        if not self._has_given and ((self._holds_all and start < 0) or not held.strip()):
            return ""
        upto = start if start >= 0 else len(held) - _begun(held)
        self._held = [held[upto:]]
        self._has_given = self._has_given or upto > 0
        return held[:upto]

    def finish(self, text: str = "") -> tuple[str, list[dict[str, Any]]]:
        """The text that was held back, and the calls in OpenAI's shape.

        Args:
            text: the last piece of the answer.
        """
        held = "".join((*self._held, text))
        self._held = []
        if not self._names:
            return held, []
        before, calls, at = "", [], 0
        if not self._has_given and held.lstrip().startswith("{"):
            call, end = self._call(held, 0)
            if call is not None and not held[end:].strip():
                return "", [call]
        while (start := held.find(OPENS, at)) >= 0:
            call, end = self._call(held, start + len(OPENS))
            if call is None:
                break
            before, at = before + held[at:start], end
            calls.append(call)
            if held[at:].lstrip().startswith(CLOSES):
                at = held.index(CLOSES, at) + len(CLOSES)
            if not held[at:].strip():
                at = len(held)
        return before + held[at:], calls[: self._max_calls]

    def _call(self, text: str, start: int) -> tuple[dict[str, Any] | None, int]:
        """The call whose JSON begins at a place, after white space, and where it ends; None where there is none."""
        start = len(text) - len(text[start:].lstrip())
        try:
            value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, start)
            if not isinstance(value, dict) or value.get("name") not in self._names:
                return None, start
            arguments = value.get("arguments", value.get("parameters", {}))  # the latter is Llama's word
            if isinstance(arguments, str):
                arguments = read_arguments(arguments)
            if not isinstance(arguments, dict):
                return None, start
            check_bounds(arguments)
        except (ValueError, TypeError, RecursionError):
            return None, start
        function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}, end  # Mistral's templates want 9


def _begun(text: str) -> int:
    """Length of the longest end of a text that a call begins with."""
    return next((size for size in range(min(len(OPENS) - 1, len(text)), 0, -1) if OPENS.startswith(text[-size:])), 0)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
