"""A thread that does the store's work that nobody waits for: writes of new entries, copies into RAM."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from cacheblend.base.errors import StoreError

logger = logging.getLogger(__name__)

_MAX_OFFERS = 16


class Background:
    """Runs jobs one after the other, in order, on a thread that starts with the first.

    A job that raises is logged, and the next one runs: whoever wants to know how a job went has it say so itself. It keeps no
    reference to who gave it jobs that are done, so that an unclosed store can be collected, and warn.

    Args:
        queue_bytes: bytes of submitted jobs that may wait; a larger one waits alone.

    """

    def __init__(self, queue_bytes: int) -> None:
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._given, self._done, self._waiting_bytes = 0, 0, 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None], job_bytes: int) -> None:
        """Queue a job; blocks while the queue is full.

        Raises:
            StoreError: the thread was told to end.

        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or not self._waiting_bytes or self._waiting_bytes + job_bytes <= self._queue_bytes
            )
            if self._stopping:
                raise StoreError("the store was closed before the entry was queued")
            self._add(job, job_bytes)

    def offer(self, job: Callable[[], None]) -> None:
        """Queue a job that is merely useful: dropped when there is much to do."""
        with self._changed:
            if not self._stopping and len(self._jobs) < _MAX_OFFERS:
                self._add(job, 0)

    def flush(self) -> None:
        """Wait until all jobs given so far are done, well or not."""
        with self._changed:
            given = self._given
            self._changed.wait_for(lambda: self._done >= given)

    def stop(self) -> None:
        """End the thread once its jobs are done, without waiting for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish all jobs and end the thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _add(self, job: Callable[[], None], job_bytes: int) -> None:
        self._jobs.append((job, job_bytes))
        self._given += 1
        self._waiting_bytes += job_bytes
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cacheblend-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopping)
                if not self._jobs:
                    return
                job, job_bytes = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # the thread must go on with the others
                logger.error("work in the background failed: %s", error)
            del job
            with self._changed:
                self._done += 1
                self._waiting_bytes -= job_bytes
                self._changed.notify_all()
