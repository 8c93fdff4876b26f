"""How long others ran between the steps of a prefill."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

from cacheblend.blend import LayerReport

_Done = TypeVar("_Done")


class AwayClock:
    """Counts the seconds between the steps of a prefill, in which others ran."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, steps: Generator[LayerReport, None, _Done]) -> Generator[LayerReport, None, _Done]:
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
