"""A loader whose reads take at least as long as on a device of a given rate; the store knows nothing of it."""

from __future__ import annotations

import threading
import time

from cacheblend.loader import LayerLoader, LoaderConfig
from cacheblend.loader.staging import LayerBuffer
from cacheblend.store import KVHandle


class Throttle:
    """A device of so many bytes a second that serves one read after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int) -> None:
        """Return when the device would have read so many bytes more."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + count / self.bytes_per_s
            ready = self._free_at
        time.sleep(max(0.0, ready - time.perf_counter()))


class ThrottledLoader(LayerLoader):
    """A loader whose reads of stored KV take at least the throttle's time."""

    def __init__(self, config: LoaderConfig, throttle: Throttle) -> None:
        super().__init__(config)
        self._throttle = throttle

    def waits_for_device(self, kv: KVHandle) -> bool:
        """See `LayerLoader.waits_for_device`: the throttle is one."""
        return kv.tier != "memory"

    def fetch_kv(self, kv: KVHandle, layer: int, buffer: LayerBuffer, start: int, stop: int) -> None:
        """See `LayerLoader.fetch_kv`."""
        super().fetch_kv(kv, layer, buffer, start, stop)
        if kv.tier != "memory":
            self._throttle.wait(kv.layer_bytes(layer))
