"""Speed of a remote tier, as its reads show it: seconds to the first byte, and bytes a second after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

MIN_BYTES = 128 * 1024  # fewer say nothing of the throughput
WEIGHT = 0.5  # of the last reads
CHANGED = 2.0  # times as much or as little: the network is another, and what was seen before says nothing of it
FRESH_S = 60.0  # for which a speed holds


class RemoteSpeed(NamedTuple):
    """Cost of reads of a remote tier: `latency_s` once, and their bytes."""

    latency_s: float
    bytes_per_s: float


class SpeedMeter:
    """Learns a remote tier's speed from streams of reads; the last ones count most, and a changed network at once. Thread-safe.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._observed_at = clock, 0.0
        self._lock = threading.Lock()
        self._latency_s: float | None = None
        self._byte_s: float | None = None

    def speed(self) -> RemoteSpeed | None:
        """The speed; None before anything was read, and a while after: a remote that was slow is tried again."""
        with self._lock:
            if self._byte_s is None or self._clock() - self._observed_at > FRESH_S:
                return None
            return RemoteSpeed(self._latency_s or 0.0, 1 / self._byte_s)

    @property
    def latency_s(self) -> float | None:
        """Seconds to the first byte; None before anything was read."""
        return self._latency_s

    def observe(self, latency_s: float | None, count: int, seconds: float) -> None:
        """Note a stream: seconds to its first answer, and bytes and seconds of those after it."""
        with self._lock:
            if latency_s is not None:
                self._latency_s = _mixed(self._latency_s, latency_s)
            if count >= MIN_BYTES and seconds > 0:
                self._byte_s = _mixed(self._byte_s, seconds / count)
                self._observed_at = self._clock()


class StreamClock:
    """Times one stream for a `SpeedMeter`: the seconds in which answers were awaited.

    Args:
        meter: told by `stop`.
        clock: seconds that only grow.
        tells_latency: whether the first answer comes as soon as anything could. It does not where it has many bytes: then its
            seconds but for the latency that is known are those of its bytes.
    """

    def __init__(
        self, meter: SpeedMeter, clock: Callable[[], float] = time.perf_counter, *, tells_latency: bool = True
    ) -> None:
        self._meter, self._clock, self._tells_latency = meter, clock, tells_latency
        self._since = 0.0
        self._waiting = 0
        self._latency_s: float | None = None
        self._bytes, self._seconds = 0, 0.0

    def ask(self, count: int) -> None:
        """Note that so many more answers are awaited."""
        if not self._waiting:
            self._since = self._clock()
        self._waiting += count

    def answer(self, count: int) -> None:
        """Note an answer of so many bytes."""
        now = self._clock()
        if self._tells_latency and self._latency_s is None:  # its own bytes are in it, as little as they may be
            self._latency_s = now - self._since
        else:
            self._bytes += count
            self._seconds += now - self._since
        self._since = now
        self._waiting -= 1

    def stop(self) -> None:
        """Tell the meter what was seen, waits that had no answer included."""
        if self._waiting:
            self._seconds += self._clock() - self._since
        if not self._tells_latency:
            self._seconds = max(self._seconds - (self._meter.latency_s or 0.0), self._seconds / 2)
        self._meter.observe(self._latency_s, self._bytes, self._seconds)


def _mixed(before: float | None, now: float) -> float:
    if before is None or not before / CHANGED <= now <= before * CHANGED:
        return now
    return (1 - WEIGHT) * before + WEIGHT * now
