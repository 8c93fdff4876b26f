"""Write-behind: entries and removals on their way to the remote tier, in bounded memory, sent by a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cacheblend.base.errors import RemoteError
from cacheblend.store.entry import EncodedEntry

from .breaker import CircuitBreaker
from .removal_log import RemovalLog

logger = logging.getLogger(__name__)
GROUP_ENTRIES = 32  # sent after one look-up of which are there already
MAX_ATTEMPTS = 5
MAX_REMOVALS = 65_536  # that wait


@dataclass(slots=True, eq=False)
class _Change:
    """An entry to send, or None for a removal."""

    entry: EncodedEntry | None
    attempts: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.entry is None else self.entry.nbytes


class UploadQueue:
    """Changes of the remote tier, one a digest, the last one counts. Thread-safe; nobody waits for the remote.

    What cannot be sent is tried again after the breaker's pause, a group one by one. An entry that finds no room, or has itself
    failed `MAX_ATTEMPTS` times, is dropped and counted: `cacheblend store push` sends it later. Removals that wait are noted on
    disk, and wait again when the store is opened next.

    Args:
        send: sends entries that are not there yet; raises `RemoteError`.
        remove: removes entries by digest; raises `RemoteError`.
        breaker: asked before each call, and told how it ended.
        limit_bytes: of entries that wait.
        removals: where those that wait are noted.
    """

    def __init__(
        self,
        send: Callable[[Sequence[EncodedEntry]], None],
        remove: Callable[[Sequence[str]], None],
        breaker: CircuitBreaker,
        limit_bytes: int,
        removals: RemovalLog,
    ) -> None:
        self._send, self._remove, self._breaker, self._limit_bytes = send, remove, breaker, limit_bytes
        self._removals = removals
        self._noting = threading.Lock()  # a removal is noted and waits, or neither
        self._changed = threading.Condition()
        self._changes: OrderedDict[str, _Change] = OrderedDict()
        self._bytes = 0
        self._under_way: frozenset[str] = frozenset()
        self._one_by_one = 0  # changes that are made alone, after a group of so many failed
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self._enter_removals(removals.waiting())

    def put(self, entry: EncodedEntry) -> bool:
        """Have an entry sent, not copied; False where there is no room, which is counted."""
        digest = entry.info.key.digest
        with self._changed:
            before = self._changes.get(digest)
            if before is not None and before.entry is not None:
                return True
            if self._stopping or self._bytes + entry.nbytes > self._limit_bytes:
                self.dropped += 1
                return False
            self._enter(digest, _Change(entry))
            return True

    def remove(self, digests: Iterable[str]) -> None:
        """Have entries removed, and not sent any more."""
        digests = list(digests)
        with self._noting:
            self._removals.note(digests)
            self._enter_removals(digests)

    def _enter_removals(self, digests: Iterable[str]) -> None:
        with self._changed:
            for digest in digests:
                self._enter(digest, _Change(None))
            removals = [digest for digest, change in self._changes.items() if change.entry is None]
            for digest in removals[: max(0, len(removals) - MAX_REMOVALS)]:
                self._leave(digest)
                self.dropped += 1

    def is_removing(self, digest: str) -> bool:
        """Whether a removal of the entry waits."""
        change = self._changes.get(digest)
        return change is not None and change.entry is None

    def size(self) -> tuple[int, int]:
        """Changes that wait, and the bytes of the entries among them."""
        with self._changed:
            return len(self._changes), self._bytes

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing waits; False after the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._changes and not self._under_way, timeout_s)

    def close(self, timeout_s: float) -> int:
        """Send what waits, for so long, and end the thread; gives how many entries were not sent, for removals are noted."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._changes or self._breaker.state == "open", timeout_s)
            self._stopping = True
            left = sum(change.entry is not None for change in self._changes.values())
            self.dropped += left
            self._changes.clear()
            self._bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)
        self._removals.close()
        return left

    def _enter(self, digest: str, change: _Change) -> None:
        self._leave(digest)
        self._changes[digest] = change
        self._bytes += change.nbytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cacheblend-remote-writes", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _leave(self, digest: str) -> None:
        change = self._changes.pop(digest, None)
        if change is not None:
            self._bytes -= change.nbytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes or self._stopping)
                while not self._stopping and (pause_s := self._breaker.wait_s()) > 0:
                    self._changed.wait(pause_s)
                if self._stopping:
                    return
                group = self._group()
                self._under_way = frozenset(group)
            if group and self._breaker.allows():
                self._make(group)
            del group
            with self._changed:
                self._under_way = frozenset()
                self._changed.notify_all()

    def _group(self) -> dict[str, _Change]:
        """The first changes of one kind."""
        group: dict[str, _Change] = {}
        limit = 1 if self._one_by_one else GROUP_ENTRIES
        for digest, change in self._changes.items():
            if len(group) == limit or (group and (change.entry is None) != (next(iter(group.values())).entry is None)):
                break
            group[digest] = change
        return group

    def _make(self, group: dict[str, _Change]) -> None:
        """Make changes; those that were replaced meanwhile stay to be made."""
        entries = [change.entry for change in group.values() if change.entry is not None]
        self._one_by_one = max(0, self._one_by_one - 1)
        try:
            if entries:
                self._send(entries)
            else:
                self._remove(list(group))
        except RemoteError as error:
            if self._breaker.fail():
                logger.warning("nothing is written to the remote tier for a while: %s", error)
            if len(entries) > 1:  # it may be for the sake of one of them
                self._one_by_one = len(entries)
            elif entries:
                self._fail(*next(iter(group.items())))
            return
        except Exception:  # the thread must go on with the others
            self._breaker.fail()  # whoever was allowed a call says how it ended; out of memory, it waits as well
            if len(entries) > 1:
                self._one_by_one = len(entries)
                return
            logger.exception("%d changes were not made in the remote tier", len(group))
            self.dropped += len(group)
        else:
            self._breaker.succeed()
            with self._noting:
                self._removals.settle([digest for digest, change in group.items() if self._changes.get(digest) is change])
        with self._changed:
            for digest, change in group.items():
                if self._changes.get(digest) is change:
                    self._leave(digest)

    def _fail(self, digest: str, change: _Change) -> None:
        """Note that an entry was not sent; it is tried again after the others, or dropped."""
        change.attempts += 1
        with self._changed:
            if self._changes.get(digest) is not change:
                return
            if change.attempts >= MAX_ATTEMPTS:
                self._leave(digest)
                self.dropped += 1
            else:
                self._changes.move_to_end(digest)
