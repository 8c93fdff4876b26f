"""Progress of long work: how much of it is done, and a check that may end it.

It stands on the lowest floor because every floor of an ingest reports to it: splitter, embedder, engine, service and Ray.
"""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[], None]
Note = Callable[[str, int, int], None]


class Progress:
    """Progress of an ingest. Whoever follows the ingest passes functions, or overrides the methods.

    Attributes:
        documents: documents done so far.
        tokens: tokens whose KV was computed so far.

    Args:
        note: called by `note`.
        check: called by `check`.
    """

    def __init__(self, note: Note | None = None, check: Check | None = None) -> None:
        self._note, self._check = note, check
        self.documents = self.tokens = 0

    def check(self) -> None:
        """Called between the steps of the work, also within a long text; what it raises ends the work."""
        if self._check is not None:
            self._check()

    def note(self, stage: str, done: int, total: int) -> None:
        """Called when a part of a batch is done: a document of the stage "index", a chunk of the stage "precompute"."""
        if self._note is not None:
            self._note(stage, done, total)

    def note_windows(self, done: int, total: int) -> None:
        """Called between the batches of the embedder, with windows of text."""

    def note_batch(self) -> None:
        """Called when a batch of a stream is durable."""
