"""Write-behind: what one entry or removal meets is no other's."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from chunks import make_chunk
from waiting import WAIT_S

from cacheblend.base.errors import RemoteError
from cacheblend.store.entry import EncodedEntry
from cacheblend.store.remote.breaker import CircuitBreaker
from cacheblend.store.remote.removal_log import RemovalLog
from cacheblend.store.remote.upload_queue import MAX_ATTEMPTS, UploadQueue

ENTRIES = [EncodedEntry.of(*make_chunk(seed)) for seed in range(1, 13)]
DIGESTS = [entry.info.key.digest for entry in ENTRIES]


class Remote:
    """A remote that has what it was sent, refuses one entry, and may be held in the midst of sending."""

    def __init__(self, refused: str, error: Exception) -> None:
        self.there: list[str] = []
        self.refusals = 0
        self._refused, self._error = refused, error
        self.sending, self.go_on, self.removing = threading.Event(), threading.Event(), threading.Event()

    def send(self, entries: Sequence[EncodedEntry]) -> None:
        self.sending.set()
        self.go_on.wait(WAIT_S)
        for entry in entries:
            digest = entry.info.key.digest
            if digest == self._refused:
                self.refusals += 1
                raise self._error
            if digest not in self.there:
                self.there.append(digest)

    def remove(self, digests: Sequence[str]) -> None:
        self.removing.set()
        raise RemoteError("read only")


class NoPause(CircuitBreaker):
    """Tells nobody to wait, so that a test need not."""

    def wait_s(self) -> float:
        return 0.0

    def allows(self) -> bool:
        return True


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RemovalLog]:
    log = RemovalLog(tmp_path / "removals")
    yield log
    log.close()


@pytest.mark.parametrize("error", [RemoteError("too large"), ValueError("no header")])
def test_a_refused_entry_takes_no_other_along(log: RemovalLog, error: Exception) -> None:
    """Of a group with one entry that is refused again and again, all others are sent, and that one alone is dropped."""
    remote = Remote(DIGESTS[0], error)
    queue = UploadQueue(remote.send, remote.remove, NoPause(), 2**30, log)
    for entry in ENTRIES:
        assert queue.put(entry)
    remote.go_on.set()
    assert queue.flush(WAIT_S)
    assert sorted(remote.there) == sorted(DIGESTS[1:])
    assert queue.dropped == 1
    assert remote.refusals >= (MAX_ATTEMPTS if isinstance(error, RemoteError) else 1)
    queue.close(1.0)


def test_a_try_that_meets_another_error_ends(log: RemovalLog) -> None:
    """An entry that no memory is left for, when the remote is tried after a pause, is dropped, and the next pause begins."""
    now = 0.0
    breaker = CircuitBreaker(lambda: now)
    while not breaker.fail():
        pass
    now += breaker.wait_s()
    remote = Remote(DIGESTS[0], MemoryError())
    queue = UploadQueue(remote.send, remote.remove, breaker, 2**30, log)
    remote.go_on.set()
    queue.put(ENTRIES[0])
    assert queue.flush(WAIT_S)
    assert (queue.dropped, breaker.state, breaker.wait_s()) == (1, "open", 2.0)
    queue.close(0.1)


def test_a_removal_is_noted_until_it_is_made(log: RemovalLog) -> None:
    """An entry that is removed while it is being sent stays noted when the send ends: the removal still waits."""
    remote = Remote("", RemoteError(""))
    queue = UploadQueue(remote.send, remote.remove, NoPause(), 2**30, log)
    queue.put(ENTRIES[0])
    assert remote.sending.wait(WAIT_S)
    queue.remove(DIGESTS[:1])
    remote.go_on.set()
    assert remote.removing.wait(WAIT_S)  # the send is over
    assert queue.is_removing(DIGESTS[0])
    assert log.waiting() == DIGESTS[:1]
    queue.close(0.1)
