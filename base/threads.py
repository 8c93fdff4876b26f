"""Threads: reusable daemons whose tasks begin at once; a thread for one call; and a thread's low priority."""

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
    """Runs each task at once, in an idle thread or a new one; no task waits for another.

    A thread without a task for `idle_s` seconds ends. Threads are daemons: a task that waits for a vanished consumer does not
    prevent the process from ending.
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
        """Begin a task; the event is set at its end. Its exception is logged."""
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
        """Begin a task; the future has its result or exception. A caller that stops waiting does not stop the task."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(task())
            except BaseException as error:  # the future carries it to the caller
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
            except BaseException:  # the thread must survive for the next task
                logger.exception("a task of the threads %s failed", self._name)
            del task  # its closure may hold large objects
            with self._changing:
                self._busy -= 1
                self._idle += 1
            ended.set()


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of threads that it starts.

    Beside a busy thread it still gets about a tenth of a processor. Only Linux has a niceness for each thread; elsewhere this
    does nothing.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, max(LOW_PRIORITY_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def in_own_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new thread that ends with it; return its result or raise its exception.

    An interrupt is raised once the function has ended. PyTorch makes an OpenMP team for every thread that computes. Once all
    teams have more threads than there are processors, they sleep between two operations, and a blend needs a third more time.
    So in a service only the scheduler's thread has a lasting team.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args, **kwargs).result()
