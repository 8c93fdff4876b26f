"""A stream of layers from the remote tier: many are asked for over one connection, and come in that order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from cacheblend.base.errors import RemoteError

from .remote_entry import RemoteEntry
from .speed import StreamClock

if TYPE_CHECKING:
    from cacheblend.store.chunk import KVHandle
    from cacheblend.store.tiers import Placement

    from .backend import RangeReader
    from .remote_tier import RemoteTier


class RemoteStream:
    """A `LayerStream` of placements in the remote tier."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier
        self._clock = StreamClock(tier.meter)
        self._reader: RangeReader | None = None
        self._asked: deque[tuple[Placement, int]] = deque()
        self._aborted = False

    def request(self, reads: Sequence[tuple[KVHandle, int]]) -> None:
        """See `LayerStream`."""
        placed = [(cast("Placement", kv), layer) for kv, layer in reads]
        ranges = [_entry(placement).layout.range_of(layer) for placement, layer in placed]
        try:
            if self._reader is None:
                if not self._tier.reads.allows():
                    raise RemoteError(f"the remote tier at {self._tier.address} is not asked for a while")
                self._reader = self._tier.backend.reader()
            self._clock.ask(len(ranges))
            self._reader.request(ranges)
        except RemoteError as error:
            self._fail(error)
            raise
        self._asked.extend(placed)

    def receive(self) -> KVHandle:
        """See `LayerStream`."""
        assert self._reader is not None, "nothing was asked for"
        placement, layer = self._asked[0]
        try:
            data = self._reader.receive()
        except RemoteError as error:
            self._fail(error)
            raise
        self._asked.popleft()
        self._clock.answer(0 if data is None else len(data))
        self._tier.count_read(0 if data is None else len(data))
        return placement.received(_entry(placement).receive(layer, data))

    def abort(self, *, late: bool = False) -> None:
        """See `LayerStream`."""
        if not self._aborted:
            self._aborted = True
            if late:
                self._tier.fail(RemoteError(f"{self._tier.address} answers later than what is asked for could be computed"))
            if self._reader is not None:
                self._reader.abort()

    def close(self) -> None:
        """See `LayerStream`."""
        self._clock.stop()
        reader, self._reader = self._reader, None
        if reader is not None:
            if not self._asked and not self._aborted:
                self._tier.reads.succeed()
            reader.close()

    def _fail(self, error: RemoteError) -> None:
        if not self._aborted:
            self._aborted = True
            self._tier.fail(error)


def _entry(placement: Placement) -> RemoteEntry:
    return cast(RemoteEntry, placement.entry)
