"""Long work: a thread for a task or a call, low priority, work in groups, and its progress."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

LOW_PRIORITY_NICENESS = 10  # a tenth of the weight of a thread at 0
P = ParamSpec("P")
T = TypeVar("T")
Check = Callable[[], None]
Note = Callable[[str, int, int], None]


def in_daemon_thread(task: Callable[[], T], name: str) -> Future[T]:
    """Begin a task at once, in a thread of its own; the future has its result or exception.

    The thread is a daemon: a task that waits for a vanished consumer does not prevent the process from ending.
    """
    future: Future[T] = Future()

    def settle() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=settle, name=name, daemon=True).start()
    return future


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


def in_groups(items: Iterable[T], is_full: Callable[[list[T]], bool]) -> Iterator[list[T]]:
    """Consecutive items, in groups; a group ends with the item that makes it full."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if is_full(group):
            yield group
            group = []
    if group:
        yield group


class Progress:
    """Progress of an ingest. Whoever follows the ingest passes functions, or overrides the methods.

    Attributes:
        documents: documents done so far.
        tokens: tokens whose KV was computed so far.

    Args:
        note: called by `note`.
        check: called by `check`.
    """

    def __init__(self, note: Note = lambda *_: None, check: Check = lambda: None) -> None:
        self._note, self._check = note, check
        self.documents = self.tokens = 0

    def check(self) -> None:
        """Called between the steps of the work, also within a long text; what it raises ends the work."""
        self._check()

    def note(self, stage: str, done: int, total: int) -> None:
        """Called when a part of a batch is done: a document of the stage "index", a chunk of the stage "precompute"."""
        self._note(stage, done, total)

    def note_windows(self, done: int, total: int) -> None:
        """Called between the batches of the embedder, with windows of text."""

    def note_batch(self) -> None:
        """Called when a batch of a stream is durable."""
