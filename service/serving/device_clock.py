"""Clock of a device whose work a host launches ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import torch

LAYERS_AHEAD = 2  # that are launched on the device and have not run: enough for a device that is never idle


class DeviceEvent(Protocol):
    """A moment in the order of a device's work, as a `torch.cuda.Event` is."""

    def synchronize(self) -> None:
        """Wait until the moment has come."""


class DeviceClock:
    """Holds the host at most `LAYERS_AHEAD` layers ahead of the device, so that a decoding step waits for no more than those.

    Args:
        mark: notes the present moment in the device's order; None on a device that has run whatever was called.
    """

    def __init__(self, mark: Callable[[], DeviceEvent] | None) -> None:
        self._mark = mark
        self._layers: deque[DeviceEvent] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """The clock of a device's current stream, or of the CPU."""
        if device.type != "cuda":
            return cls(None)

        def mark() -> torch.cuda.Event:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark)

    def launched_layer(self) -> None:
        """A layer was launched; wait for an earlier one if too many have not run."""
        if self._mark is not None:
            self._layers.append(self._mark())
            if len(self._layers) > LAYERS_AHEAD:
                self._layers.popleft().synchronize()

    def now(self) -> float:
        """Wait until everything that was launched has run; `time.perf_counter` then."""
        if self._mark is not None:
            self._mark().synchronize()
            self._layers.clear()
        return time.perf_counter()
