"""How far an ingest is, how fast it goes and how long it will take, on stderr."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console

from .document_stream import DocumentStream, StreamSize

LINE_EVERY_S = 10.0


class IngestProgress:
    """A line that changes on a terminal, else a line every ten seconds, as a log wants it; a context manager.

    The speed is that since the first chunk began to be computed, so that documents which are skipped promise no early end.

    Args:
        console: where to.
        stream: the documents being read.
        size: of the stream; None where that is not known, and no time left can be told.
    """

    def __init__(self, console: Console, stream: DocumentStream, size: StreamSize | None) -> None:
        self._console, self._stream, self._size = console, stream, size
        self._skipped_characters = 0
        self._started = time.monotonic()
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._opened = ExitStack()
        self._status = self._opened.enter_context(console.status("reading")) if console.is_terminal else None

    def update(self, documents: int, tokens: int) -> None:
        """What was done so far; `StreamProgress`."""
        now = time.monotonic()
        if not tokens:
            self._skipped_characters, self._started = self._stream.characters, now
        if self._status is not None:
            self._status.update(self.line(documents, tokens, now))
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._console.print(self.line(documents, tokens, now), highlight=False, markup=False)

    def line(self, documents: int, tokens: int, now: float) -> str:
        """The line, at a time of `time.monotonic`."""
        of = f" of {self._size.documents:,}" if self._size else ""
        parts = [f"{documents:,}{of} documents", f"{tokens:,} tokens"]
        if tokens and (seconds := now - self._started) > 0:
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
            characters = self._stream.characters - self._skipped_characters
            if self._size is not None and characters:
                left_s = seconds * (self._size.characters - self._stream.characters) / characters
                parts.append(f"{timedelta(seconds=round(left_s))} left")
        return ", ".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()
