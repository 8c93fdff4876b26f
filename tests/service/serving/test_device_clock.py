"""The device's clock, on a device that runs what a host launches ahead of it."""

from __future__ import annotations

import pytest
import torch

from cacheblend.service.serving.device_clock import LAYERS_AHEAD, DeviceClock


class Device:
    """Runs what is launched in order, on a clock of its own."""

    def __init__(self) -> None:
        self.host_s = self.done_s = self.idle_s = 0.0

    def launch(self, seconds: float, launch_s: float = 0.001) -> None:
        self.host_s += launch_s
        self.idle_s += max(0.0, self.host_s - self.done_s)
        self.done_s = max(self.done_s, self.host_s) + seconds

    def mark(self) -> Moment:
        return Moment(self)


class Moment:
    """An event of the device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, device.done_s

    def synchronize(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)


def test_the_host_is_a_few_layers_ahead_and_the_device_never_idle() -> None:
    """However long layers run, only a few are launched ahead, and the device has always one."""
    device = Device()
    clock = DeviceClock(device.mark)
    for _ in range(100):
        device.launch(0.02)
        clock.launched_layer()
        assert device.done_s - device.host_s <= LAYERS_AHEAD * 0.02 + 1e-9
    assert device.idle_s == pytest.approx(0.001)  # the first launch
    clock.now()
    assert device.host_s == device.done_s


def test_on_the_cpu_everything_has_run() -> None:
    """Where calls return when they have run, the clock is the host's."""
    clock = DeviceClock.of(torch.device("cpu"))
    began = clock.now()
    clock.launched_layer()
    assert clock.now() >= began
