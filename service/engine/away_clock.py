"""How long others ran between the steps of a prefill."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

_Step = TypeVar("_Step")
_Done = TypeVar("_Done")


class AwayClock:
    """Counts the seconds between the steps of a prefill, in which others ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, steps: Generator[_Step, None, _Done]) -> Generator[_Step, None, _Done]:
        """The same steps."""
        with closing(steps):
            while True:
                try:
                    report = next(steps)
                except StopIteration as done:
                    result: _Done = done.value
                    return result
                left = time.perf_counter()
                yield report
                self.seconds += time.perf_counter() - left
