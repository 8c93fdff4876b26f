"""A lane: a prompt's reads over one stream of layers from a remote tier, how far they are, and whether they come too late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cacheblend.base.checks import MIB

if TYPE_CHECKING:
    from cacheblend.store import KVHandle
    from cacheblend.store.chunk import LayerStream

STREAM_BYTES = 32 * MIB  # asked for over one stream before they came; one layer of a chunk always
GRACE = 0.25  # of a recompute's seconds, before a stream is called late
MIN_GRACE_S = 0.05


class LayerRead(NamedTuple):
    """A chunk's layer, and the chunk's place in the prompt."""

    layer: int
    start: int
    stop: int
    kv: KVHandle


class Lane:
    """Reads over one stream, in the order of layers; changed under the loader's lock."""

    def __init__(self, reads: Sequence[LayerRead]) -> None:
        self.reads, self.stream = reads, reads[0].kv.stream
        self.opened: LayerStream | None = None
        self.asked: deque[LayerRead] = deque()
        self.next, self.asked_bytes, self.received_bytes = 0, 0, 0
        self.left_bytes = sum(read.kv.layer_bytes(read.layer) for read in reads)
        self._busy_s, self._busy_since = 0.0, 0.0

    def take(self, before_layer: int) -> list[LayerRead]:
        """The next reads to ask for, of layers before this one, so that `STREAM_BYTES` are on their way."""
        taken: list[LayerRead] = []
        if not self.asked:
            self._busy_since = time.perf_counter()
        while self.next < len(self.reads) and (read := self.reads[self.next]).layer < before_layer:
            nbytes = read.kv.layer_bytes(read.layer)
            if self.asked and self.asked_bytes + nbytes > STREAM_BYTES:
                break
            self.asked.append(read)
            taken.append(read)
            self.next, self.asked_bytes = self.next + 1, self.asked_bytes + nbytes
        return taken

    def came(self) -> LayerRead:
        """The read that was asked for first, which is here now."""
        read = self.asked.popleft()
        nbytes = read.kv.layer_bytes(read.layer)
        self.asked_bytes, self.received_bytes, self.left_bytes = (
            self.asked_bytes - nbytes,
            self.received_bytes + nbytes,
            self.left_bytes - nbytes,
        )
        if not self.asked:
            self._busy_s += time.perf_counter() - self._busy_since
        return read

    def is_late(self, restart_s: float, latency_s: float) -> bool:
        """Whether what is left comes later than a recompute begun now would end, at the pace of the time under way."""
        busy_s = self._busy_s + time.perf_counter() - self._busy_since
        if not self.asked or busy_s < max(MIN_GRACE_S, GRACE * restart_s, 2 * latency_s):
            return False
        return not self.received_bytes or self.left_bytes * busy_s / self.received_bytes > restart_s


def lanes_of(reads: Sequence[LayerRead]) -> list[Lane]:
    """A lane for each tier."""
    by_tier: dict[str, list[LayerRead]] = {}
    for read in reads:
        by_tier.setdefault(read.kv.tier, []).append(read)
    return list(map(Lane, by_tier.values()))
