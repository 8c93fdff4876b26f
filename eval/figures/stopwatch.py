"""Times calls side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

ROUNDS = 5
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Call:
    """What is timed, and what is done before each time, untimed."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def median_seconds(calls: Mapping[Key, Call], device: torch.device) -> dict[Key, float]:
    """The median of `ROUNDS` interleaved rounds, after one that does not count."""
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS + 1):
        for key, call in calls.items():
            call.before()
            _settle(device)
            started = time.perf_counter()
            call.run()
            _settle(device)
            seconds[key].append(time.perf_counter() - started)
    return {key: statistics.median(times[1:]) for key, times in seconds.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
