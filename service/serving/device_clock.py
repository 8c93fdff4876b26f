"""Device clock: the seconds that layers take on the device, which a GPU's host launches before they run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch

LAYERS_AHEAD = 2  # that are launched and have not run: enough for a device that is never idle


class DeviceEvent(Protocol):
    """A moment in the order of what a device does, as `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Wait until it has come."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds to a later one; both have come."""


class HostEvent:
    """A moment on the CPU, where what was called has run: it has come."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """See `DeviceEvent`."""
        return True

    def synchronize(self) -> None:
        """See `DeviceEvent`."""

    def elapsed_time(self, end_event: Self) -> float:
        """See `DeviceEvent`."""
        return (end_event._at_s - self._at_s) * 1000


class DeviceClock:
    """Tells what each layer took on the device, and keeps the host at most `LAYERS_AHEAD` layers ahead of it.

    So a step of the batch that becomes due waits for no more than those. A wait is for one event of the current stream, behind
    which the device has more to do; copies on other streams go on, and nobody waits for them.

    Args:
        mark: notes the present moment in the device's order.
    """

    def __init__(self, mark: Callable[[], DeviceEvent]) -> None:
        self._mark = mark
        self._layers: deque[tuple[DeviceEvent, DeviceEvent, Callable[[float], None]]] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """The clock of a device's current stream, or of the CPU."""
        if device.type != "cuda":
            return cls(HostEvent)

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark)

    @contextmanager
    def measure(self, spend: Callable[[float], None]) -> Iterator[None]:
        """Measure what the block launches; `spend` is called with its seconds once it has run, here or in a later call."""
        began = self._mark()
        try:
            yield
        finally:
            self._layers.append((began, self._mark(), spend))
            while self._layers and (len(self._layers) > LAYERS_AHEAD or self._layers[0][1].query()):
                self._end_first()

    def now(self) -> float:
        """Seconds of `time.perf_counter` when all that was launched has run, and was spent."""
        self._mark().synchronize()
        while self._layers:
            self._end_first()
        return time.perf_counter()

    def _end_first(self) -> None:
        began, ended, spend = self._layers.popleft()
        ended.synchronize()
        spend(began.elapsed_time(ended) / 1000)
