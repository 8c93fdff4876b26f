"""Read-through: what requests found in the remote tier comes to NVMe and RAM afterwards, in bounded memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cacheblend.base.errors import DamagedEntryError, StoreError
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.eviction import AdmissionFilter

from .remote_tier import RemoteTier

logger = logging.getLogger(__name__)
WAITING_BYTES = 256 * 2**20  # of entries that are read, or wait to be


class _Copy(NamedTuple):
    nbytes: int
    load: Callable[[], EncodedEntry]
    found: int


class ReadThrough:
    """A store's remote tier, of which entries are copied to the tiers before it, in a thread. Thread-safe.

    An entry is admitted where NVMe has room for it, or it was read not long ago as well, as the RAM tier has it. What finds no
    room among the waiting is not copied this time.

    Args:
        tier: the remote one; closed with this.
        store: stores a copy that was found at a time of the `WriteQueue`; raises `StoreError` where it cannot.
        has_room: whether NVMe has room for so many bytes.
        limit_bytes: NVMe's budget, and so what "not long ago" is.
    """

    def __init__(
        self,
        tier: RemoteTier,
        store: Callable[[EncodedEntry, int], None],
        has_room: Callable[[int], bool],
        limit_bytes: int,
    ) -> None:
        self.tier = tier
        self._store, self._has_room, self._limit_bytes = store, has_room, limit_bytes
        self._recent_reads = AdmissionFilter(limit_bytes)
        self._changed = threading.Condition()
        self._copies: deque[_Copy] = deque()
        self._bytes = 0
        self._busy = self._stopping = False
        self._thread: threading.Thread | None = None

    def admits(self, digest: str, nbytes: int) -> bool:
        """Whether an entry that a request reads is worth a copy; then its bytes are reserved for its `offer`."""
        again = self._recent_reads.admits(digest, nbytes)
        if nbytes > self._limit_bytes or not (again or self._has_room(nbytes)):
            return False
        with self._changed:
            if self._stopping or self._bytes + nbytes > WAITING_BYTES:
                return False
            self._bytes += nbytes
            return True

    def offer(self, nbytes: int, load: Callable[[], EncodedEntry], found: int) -> None:
        """Have an admitted entry copied, which was found at a time of the `WriteQueue`; its bytes are given back then."""
        with self._changed:
            if self._stopping:
                return
            self._copies.append(_Copy(nbytes, load, found))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cacheblend-read-through", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until every copy that was offered is made, or failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copies and not self._busy)

    def close(self, timeout_s: float) -> None:
        """Make no further copy, end the thread, and close the tier; a read that is under way is left after the time."""
        with self._changed:
            self._stopping = True
            self._copies.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.tier.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._copies or self._stopping)
                if self._stopping:
                    return
                copy = self._copies.popleft()
                self._busy = True
            try:
                entry = copy.load()
                if not self._stopping:
                    self._store(entry, copy.found)
                del entry
            except DamagedEntryError as error:  # who reads it next is told
                logger.debug("an entry of the remote tier was not copied: %s", error)
            except StoreError as error:
                logger.info("an entry of the remote tier was not copied: %s", error)
            except Exception:  # the thread must go on with the others
                logger.exception("an entry of the remote tier was not copied")
            nbytes = copy.nbytes
            del copy
            with self._changed:
                self._bytes -= nbytes
                self._busy = False
                self._changed.notify_all()
