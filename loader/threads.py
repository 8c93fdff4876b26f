"""Threads that are kept for the next task: starting one takes milliseconds beside busy cores, and every request loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class DaemonThreads:
    """Runs each task at once, in an idle thread or a new one; a task never waits for another's end.

    They are daemons: a task that waits for a consumer who is gone does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[tuple[Callable[[], None], threading.Event]] = SimpleQueue()
        self._changing = threading.Lock()
        self._idle = 0
        self._busy = 0

    @property
    def busy(self) -> int:
        """Tasks that have not ended."""
        return self._busy

    def run(self, task: Callable[[], None]) -> threading.Event:
        """Begin a task that raises nothing; the event is set at its end."""
        ended = threading.Event()
        with self._changing:
            self._busy += 1
            is_new = not self._idle
            if not is_new:
                self._idle -= 1
        self._tasks.put((task, ended))
        if is_new:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return ended

    def _work(self) -> None:
        while True:
            task, ended = self._tasks.get()
            try:
                task()
            finally:
                del task  # what it holds may be large
                with self._changing:
                    self._busy -= 1
                    self._idle += 1
                ended.set()
