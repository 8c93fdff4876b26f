"""JSON that clients and models write for tools: bounded before anything is made of it."""

from __future__ import annotations

import json
from typing import Any, TypeVar

MAX_TOOL_CHARACTERS = 2**16  # of all tools of a request as JSON, and of one call's arguments
MAX_TOOL_DEPTH = 32  # levels of the same
_Json = TypeVar("_Json")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON has objects and lists on more than `levels` levels."""
    level = [value]
    for _ in range(levels + 1):
        inner = [one for one in level if isinstance(one, dict | list)]
        if not inner:
            return False
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return True


def check_bounds(value: _Json) -> _Json:
    """The value; a ValueError if it is too long or too deep, or has text that is no Unicode or a number that is not finite."""
    if is_deeper(value, MAX_TOOL_DEPTH):
        raise ValueError(f"is more than {MAX_TOOL_DEPTH} levels deep; make it simpler")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        raise ValueError("has NaN, a number beyond 1e308, or half a character, which JSON has not; leave it out") from None
    if len(text) > MAX_TOOL_CHARACTERS:
        raise ValueError(f"has more than {MAX_TOOL_CHARACTERS} characters as JSON; make it shorter")
    return value


def read_arguments(text: Any) -> dict[str, Any]:
    """A call's arguments from their JSON; a ValueError if it is not that of an object, or outside the bounds."""
    try:
        value = json.loads(text) if isinstance(text, str) and len(text) <= MAX_TOOL_CHARACTERS else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"must be the JSON of an object, as the service gave it, of at most {MAX_TOOL_CHARACTERS} characters")
    return check_bounds(value)


def read_earlier_arguments(given: Any) -> dict[str, Any] | str:
    """The arguments of a call in a conversation: an object, or the text of what a model has written in place of one."""
    if given == "" or isinstance(given, dict):
        return check_bounds(given or {})
    try:
        return read_arguments(given)
    except ValueError:
        if not isinstance(given, str) or len(given) > MAX_TOOL_CHARACTERS:
            raise
        return given
