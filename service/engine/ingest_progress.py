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
CHARACTERS_PER_TOKEN = 4.0  # until a batch of documents says how many there are


class IngestProgress:
    """A line that changes on a terminal, else a line every ten seconds, as a log wants it; a context manager.

    The speed is that since the first chunk began to be computed, so that documents which are skipped promise no early end. What
    is done is told by the computed tokens: documents are read, and counted, a batch at a time.

    Args:
        console: where to.
        stream: the documents being read.
        size: of the stream; None where that is not known, and no time left can be told.
    """

    def __init__(self, console: Console, stream: DocumentStream, size: StreamSize | None) -> None:
        self._console, self._stream, self._size = console, stream, size
        self._skipped_characters = self._done_characters = 0
        self._done_documents = self._done_tokens = 0
        self._started = time.monotonic()
        self._next_line = time.monotonic() + LINE_EVERY_S
        self._opened = ExitStack()
        self._status = self._opened.enter_context(console.status("reading")) if console.is_terminal else None

    def update(self, documents: int, tokens: int) -> None:
        """What was done so far; `StreamProgress`."""
        now = time.monotonic()
        if not tokens:
            self._skipped_characters, self._started = self._stream.characters * (documents > 0), now
        if documents != self._done_documents:  # a batch ended, and the next one is not read yet
            self._done_documents, self._done_characters, self._done_tokens = documents, self._stream.characters, tokens
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
            of_done = self._done_characters - self._skipped_characters
            per_token = of_done / self._done_tokens if self._done_tokens and of_done else CHARACTERS_PER_TOKEN
            done = self._done_characters + (tokens - self._done_tokens) * per_token
            if self._size is not None and done > self._skipped_characters:
                left_s = seconds * max(0.0, self._size.characters - done) / (done - self._skipped_characters)
                parts.append(f"{timedelta(seconds=round(left_s))} left")
        return ", ".join(parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()
