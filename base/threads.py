"""Threads: daemons that are used again, whose tasks begin at once; a thread for one call; and a thread's low priority."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)
LOW_PRIORITY_NICENESS = 10  # a tenth of the weight of a thread at 0
P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads:
    """Runs each task at once, in an idle thread or a new one; a task never waits for another's end.

    A thread without a task for `idle_s` seconds ends. They are daemons: a task that waits for a consumer who is gone does not
    keep the process from ending.
    """

    def __init__(self, name: str, idle_s: float = 5.0) -> None:
        self._name, self._idle_s = name, idle_s
        self._tasks: SimpleQueue[tuple[Callable[[], None], threading.Event]] = SimpleQueue()
        self._changing = threading.Lock()
        self._idle = 0
        self._busy = 0

    @property
    def busy(self) -> int:
        """Tasks that have not ended."""
        return self._busy

    def run(self, task: Callable[[], None]) -> threading.Event:
        """Begin a task; the event is set at its end. What it raises is logged."""
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

    def call(self, task: Callable[[], T]) -> Future[T]:
        """Begin a task; the future has what it returns or raises. Who waits for it no longer leaves the thread to its end."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # travels to whoever waits
                future.set_exception(error)

        self.run(settle)
        return future

    def _work(self) -> None:
        while True:
            try:
                task, ended = self._tasks.get(timeout=self._idle_s)
            except Empty:
                with self._changing:
                    if self._tasks.empty():
                        self._idle -= 1
                        return
                continue
            try:
                task()
            except BaseException:  # the thread is counted on for the next task
                logger.exception("a task of the threads %s failed", self._name)
            del task  # what it holds may be large
            with self._changing:
                self._busy -= 1
                self._idle += 1
            ended.set()


def lower_priority() -> None:
    """Have the calling thread, and those it starts, take the processor where no other thread of the process wants it.

    It still gets about a tenth of a processor that is wanted by another. Linux alone gives a thread a niceness of its own;
    elsewhere this does nothing.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(LOW_PRIORITY_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new thread that ends with it; returns or raises what it does, an interrupt once it has ended.

    PyTorch makes an OpenMP team for every thread that computes. Once all teams together have more threads than there are
    processors, each of them sleeps between two operations, and a blend takes a third longer. So in a service
    the scheduler's thread alone keeps its team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()
