"""Consoles for the text of others, and lines of progress: nothing is markup, and no control character reaches the terminal.

Documents, ids, models and server answers are written by others. Without this a title such as `[link=...]` becomes a link, and
an escape sequence clears the screen or writes to the clipboard, also when the output is piped and shown later.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import MofNCompleteColumn, Progress
from rich.segment import Segment
from rich.text import Text

from cacheblend.base import threads
from cacheblend.base.errors import InputError

if TYPE_CHECKING:
    from cacheblend.service.engine.document_sources import StreamSize

LOADING = "loading libraries"
LINE_EVERY_S = 10.0  # of progress, where there is no terminal

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
    """A console without markup, emoji codes and highlights, whose strings and `Text`s are `visible`; `style` sets styles."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

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
        return visible(super().format(record))


stderr = PlainConsole(stderr=True)
stdout = PlainConsole()


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 entry, 2 entries."""
    plural = noun.removesuffix("y") + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {noun if number == 1 else plural}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout, a line a row, whatever the terminal's width: no cell is cut. Figures stand at the right."""
    lines = [[visible(" ".join(str(cell).split())) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    are_figures = [all(cell[:1].isdigit() for cell in cells) for _, *cells in zip(*lines, strict=True)]
    for line in lines:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)]
        padded = (gap + cell if is_figure else cell + gap for cell, gap, is_figure in zip(line, gaps, are_figures, strict=True))
        print_line("  ".join(padded).rstrip())


def print_line(line: str) -> None:
    """A line on stdout, as it is."""
    print(visible(line))  # rich would make spaces of tabs


def note(line: str) -> None:
    """A line on stderr, as it is."""
    stderr.print(line, soft_wrap=True)


def print_json(value: Mapping[str, object]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(visible_json(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)) + "\n")


def print_result(value: Mapping[str, object], line: str, as_json: bool) -> None:
    """A command's result on stdout: one JSON object, or a line."""
    if as_json:
        print_json(value)
    else:
        print_line(line)


def confirm(question: str, remedy: str = "give --yes") -> None:
    """Ask on the terminal, and end the command unless the answer is yes; raises InputError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise InputError(f"{question} There is no terminal to ask on; {remedy}")
    typer.confirm(visible(question), abort=True, err=True)


def hush_libraries() -> None:
    """No progress bars and advice of other libraries between ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@contextmanager
def shown_stages() -> Iterator[None]:
    """Show on stderr what is being opened, until the block ends; import libraries in the block, which are shown first."""
    log = logging.getLogger("cacheblend")
    with LiveLine(LOADING, line_every_s=0) as line:
        line.show(LOADING)
        stages = _Stages(line)
        log.addHandler(stages)
        line.callback(log.removeHandler, stages)
        line.callback(log.setLevel, log.level)
        log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
        hush_libraries()
        yield


@contextmanager
def progress_bars() -> Iterator[threads.Note]:
    """A bar a stage on stderr; a line now and then where that is no terminal."""
    if not stderr.is_terminal:
        with LiveLine() as line:
            yield lambda stage, done, total: line.show(f"{stage}: {done:,} of {total:,}")
        return
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=stderr) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            task = tasks[stage] if stage in tasks else tasks.setdefault(stage, bars.add_task(stage, total=total))
            bars.update(task, completed=done, total=total)

        yield report


class LiveLine(ExitStack):
    """A line on stderr that changes on a terminal, and else comes every `line_every_s` seconds, as a log wants it."""

    def __init__(self, first: str = "reading", line_every_s: float = LINE_EVERY_S) -> None:
        super().__init__()
        self._line_every_s, self._next_line = line_every_s, time.monotonic() + line_every_s
        self._status = self.enter_context(stderr.status(first)) if stderr.is_terminal else None

    def show(self, line: str) -> None:
        now = time.monotonic()
        if self._status is not None:
            self._status.update(Text(visible(line)))
        elif now >= self._next_line:
            self._next_line = now + self._line_every_s
            note(line)


class _Stages(logging.Handler):
    """Shows records that have a stage, as `Engine` logs them."""

    def __init__(self, line: LiveLine) -> None:
        super().__init__(logging.INFO)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "stage"):
            self._line.show(record.getMessage())


class IngestProgress(LiveLine, threads.Progress):
    """Documents and tokens done, their speed, the time that is left, and how far the batch's stage is.

    The time left is that of the remaining documents at the pace of those that were computed: skipped ones promise no early end.
    """

    def __init__(self, size: StreamSize | None) -> None:
        LiveLine.__init__(self)
        threads.Progress.__init__(self)
        self._size, self._stage = size, ""
        self._started, self._skipped = time.monotonic(), 0

    def note(self, stage: str, done: int, total: int) -> None:
        self._stage = f", {stage} {done:,} of {total:,}"
        self.check()

    def note_windows(self, done: int, total: int) -> None:
        self.note("embed", done, total)

    def check(self) -> None:
        """Show what is done."""
        if not self.tokens:
            self._started, self._skipped = time.monotonic(), self.documents
        self.show(self.line())

    def note_batch(self) -> None:
        self._stage = ""
        self.check()

    def line(self) -> str:
        """The line as it is now."""
        of = f" of {self._size.documents:,}" if self._size else ""
        parts = [f"{self.documents:,}{of} documents", f"{self.tokens:,} tokens"]
        if self.tokens and (seconds := time.monotonic() - self._started) > 0:
            parts.append(f"{self.tokens / seconds:,.0f} tokens/s")
            if self._size and self.documents > self._skipped:
                left_s = seconds * (self._size.documents - self.documents) / (self.documents - self._skipped)
                parts.append(f"{timedelta(seconds=round(left_s))} left")
        return ", ".join(parts) + self._stage
