"""The device's clock, on a device that runs what a host launches ahead of it."""

from __future__ import annotations

import pytest
import torch

from cacheblend.service.serving.scheduler import LAYERS_AHEAD, DeviceClock


class Device:
    """Runs what is launched in order, on a clock of its own; each wait of the host is noted."""

    def __init__(self) -> None:
        self.host_s = self.done_s = self.idle_s = 0.0
        self.waits = 0

    def launch(self, seconds: float, launch_s: float = 0.001) -> None:
        self.host_s += launch_s
        self.idle_s += max(0.0, self.host_s - self.done_s)
        self.done_s = max(self.done_s, self.host_s) + seconds

    def mark(self) -> Moment:
        return Moment(self)


class Moment:
    """An event of the device."""

    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, max(device.done_s, device.host_s)

    def query(self) -> bool:
        return self.at_s <= self.device.host_s

    def synchronize(self) -> None:
        self.device.waits += self.at_s > self.device.host_s
        self.device.host_s = max(self.device.host_s, self.at_s)

    def elapsed_time(self, end_event: Moment) -> float:
        assert end_event.query()
        return (end_event.at_s - self.at_s) * 1000


def test_a_layer_costs_what_the_device_took() -> None:
    """Of two tenants' layers in turn, each is charged its own seconds on the device, not those of its launch or of a wait."""
    device, had = Device(), {0.02: 0.0, 0.005: 0.0}
    clock = DeviceClock(device.mark)

    def spend(seconds: float, layer_s: float) -> None:
        had[layer_s] += seconds

    for _ in range(50):
        for layer_s in had:
            with clock.measure(lambda seconds, layer_s=layer_s: spend(seconds, layer_s)):  # type: ignore[misc]
                device.launch(layer_s)
    clock.now()
    assert had == {layer_s: pytest.approx(50 * layer_s, abs=0.01) for layer_s in had}
    assert device.host_s == device.done_s


def test_the_host_is_a_few_layers_ahead_and_the_device_never_idle() -> None:
    """However long layers take, no more than a few wait to be run, and the device has always one."""
    device = Device()
    clock = DeviceClock(device.mark)
    for _ in range(100):
        with clock.measure(lambda _: None):
            device.launch(0.02)
        assert device.done_s - device.host_s <= LAYERS_AHEAD * 0.02 + 1e-9
    assert device.idle_s == pytest.approx(0.001)  # the first launch


def test_layers_that_ran_are_charged_without_a_wait() -> None:
    """Where the device is faster than its host, nothing is waited for."""
    device, had = Device(), list[float]()
    clock = DeviceClock(device.mark)
    for _ in range(10):
        with clock.measure(had.append):
            device.launch(0.0001)
    assert device.waits == 0
    assert len(had) >= 9


def test_a_failed_layer_is_charged() -> None:
    """What raises has taken its time all the same; on the CPU it is charged at once."""
    had: list[float] = []
    clock = DeviceClock.of(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock.measure(had.append):
        1 / 0  # noqa: B018  # raises
    assert len(had) == 1
    assert had[0] >= 0
