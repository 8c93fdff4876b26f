"""Waiting for what another thread or process does."""

import threading
import time
from collections.abc import Callable

from cacheblend.loader.layer_loader import THREAD_NAME

WAIT_S = 60.0  # far more than anything takes: the processors may be another's for a while


def wait_until(holds: Callable[[], bool], what: str = "it did not happen", seconds: float = WAIT_S) -> None:
    """Look again and again until it holds, and once more when the time is over; AssertionError where it does not."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            assert holds(), what
            return
        time.sleep(0.002)


def loading() -> list[threading.Thread]:
    """The threads of loaders that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
