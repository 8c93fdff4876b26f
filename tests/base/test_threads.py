"""Threads that are kept for a while: every task begins at once, and none is started where one is idle."""

import threading
import time
import weakref
from concurrent.futures import wait

import pytest

from cacheblend.base.threads import DaemonThreads


def test_tasks_never_wait_for_each_other() -> None:
    """Each of many tasks that are under way together has a thread, and the next ones take those threads."""
    threads, gate, met = DaemonThreads("kept"), threading.Event(), threading.Barrier(9)

    def task() -> None:
        met.wait(60)
        gate.wait(60)

    first = [threads.run(task) for _ in range(8)]
    met.wait(60)  # all eight run
    assert threads.busy == 8
    gate.set()
    wait(first, 60)
    assert threads.busy == 0
    for _ in range(20):
        threads.run(lambda: None).result(60)
    kept = [thread for thread in threading.enumerate() if thread.name == "kept"]
    assert len(kept) == 8
    assert all(thread.daemon for thread in kept)


def test_an_idle_thread_ends() -> None:
    """A thread that had no task for as long as was said ends, and the next task has a new one."""
    threads = DaemonThreads("ending", idle_s=0.05)
    for _ in range(3):
        wait([threads.run(lambda: None) for _ in range(4)], 60)
        until = time.monotonic() + 10
        while any(thread.name == "ending" for thread in threading.enumerate()):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_task_is_let_go() -> None:
    """What a task held is collected at its end, though its thread goes on."""

    class Large:
        def task(self) -> None:
            """Nothing."""

    threads, gone, large = DaemonThreads("let go"), threading.Event(), Large()
    weakref.finalize(large, gone.set)
    ended = threads.run(large.task)
    del large
    ended.result(60)
    assert gone.wait(60)


def test_a_task_that_raises_takes_no_thread_along() -> None:
    """After a task that raised, its thread runs the next one; the caller has the error."""
    threads = DaemonThreads("raising")

    def fail() -> int:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        threads.run(fail).result(60)
    assert threads.run(threading.get_ident).result(60) == threads.run(threading.get_ident).result(60)
