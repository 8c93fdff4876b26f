"""JSON that clients and models write for tools: bounded before anything is made of it."""

import json
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

from cacheblend.service.engine.document_sources import MAX_VALUES

MAX_TOOL_CHARACTERS = 2**16  # of a tool, a schema, or a template's variables as JSON
MAX_TOOL_DEPTH = 32  # levels of the same, and of a call's arguments
_Json = TypeVar("_Json")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has objects and lists on more than `levels` levels."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(is_deeper(part, levels - 1) for part in (value.values() if isinstance(value, dict) else value))


def check_bounds(value: _Json, *, max_characters: float = MAX_TOOL_CHARACTERS) -> _Json:
    """The value; a ValueError if it is too long or too deep, or has text that is no Unicode or a number that is not finite."""
    if is_deeper(value, MAX_TOOL_DEPTH):
        raise ValueError(f"is more than {MAX_TOOL_DEPTH} levels deep; make it simpler")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise ValueError("has NaN, a number beyond 1e308, or half a character, which JSON has not; leave it out") from None
    if len(text) > max_characters:
        raise ValueError(f"has more than {max_characters} characters as JSON; make it shorter")
    return value


def only_allowed(given: Any) -> Any:
    """A chat whose choice is of OpenAI's type "allowed_tools" as one that has only those tools, and chooses by that mode."""
    match given:
        case {"tools": [*tools], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [*chosen], "mode": mode}}}:
            with suppress(KeyError, TypeError):  # what is no tool is refused where tools are read
                named, known = ({one["function"]["name"] for one in listed} for listed in (chosen, tools))
                if unknown := named - known:  # such a choice is refused by its name
                    return {**given, "tool_choice": {"type": "function", "function": {"name": unknown.pop()}}}
                return {**given, "tools": [one for one in tools if one["function"]["name"] in named], "tool_choice": mode}
    return given


def read_arguments(given: Any) -> dict[str, Any]:
    """A call's arguments, an object or its JSON, of any length; a ValueError if they are none, or outside the other bounds."""
    if isinstance(given, str) and sum(map(given.count, "{[,")) > MAX_VALUES:
        raise ValueError(f"has more than {MAX_VALUES} values; make it simpler")
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be the JSON of an object, as the service gave it")
    return check_bounds(value, max_characters=inf)


def read_earlier_arguments(given: Any) -> dict[str, Any] | str:
    """The arguments of a call in a conversation: an object, or the text of what a model has written in place of one."""
    try:
        return read_arguments(given or {})
    except ValueError:
        if not isinstance(given, str):
            raise
        return given
