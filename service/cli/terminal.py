"""Consoles that show the text of others: nothing in it is markup, and no control character in it reaches the terminal.

Documents, ids, models and server answers are written by others. Without this a title such as `[link=...]` becomes a link, and
an escape sequence clears the screen or writes to the clipboard, also when the output is piped and shown later.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 but for tab and line feed, DEL, C1, what turns the direction of writing, and halves of surrogate pairs.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_JSON_CONTROLS = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Write control characters as their escapes, ESC as backslash x1b; a line's end of any system becomes a line feed."""
    text = text.replace("\r\n", "\n")
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_json(text: str) -> str:
    """Write the control characters that JSON allows in a string as JSON escapes, which reads back as the same value."""
    return _JSON_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainConsole(Console):
    """A console without markup and emoji codes, whose strings and `Text`s are `visible`. Styles are given by `style`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Lay out a string: made visible first, so that a table's columns are as wide as what they show."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Make segments of anything; a `Text`'s control characters are made visible here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


class VisibleFormatter(logging.Formatter):
    """Log lines for a terminal, made `visible`."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        return visible(super().format(record))
