"""Requests to an object store that wait for others: what fails there is no read's fault, unless the store is silent."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from waiting import WAIT_S, wait_until

from cacheblend.base.errors import RemoteError
from cacheblend.base.threads import DaemonThreads
from cacheblend.store.remote.address import RemoteAddress
from cacheblend.store.remote.backend import BackendLimits, ObjectRange

obstore = pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")

from obstore.exceptions import GenericError, PermissionDeniedError  # noqa: E402  # where it is installed

from cacheblend.store.remote.object_backend import REQUESTS, ObjectBackend  # noqa: E402  # likewise

THREADS = DaemonThreads("calls")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[ObjectBackend]:
    backend = RemoteAddress(f"file://{tmp_path}/objects").open(BackendLimits(timeout_s=WAIT_S))
    assert isinstance(backend, ObjectBackend)
    yield backend
    backend.close()


class Call:
    """A call of the library that waits until the test lets it go on, and then fails, or does what it does."""

    def __init__(self, goes_on: Callable[..., Awaitable[object]], error: Exception | None = None) -> None:
        self._call, self._error = goes_on, error
        self.begun, self._open = 0, threading.Event()

    async def __call__(self, *arguments: object, **options: object) -> object:
        self.begun += 1
        while not self._open.is_set():
            await asyncio.sleep(0.001)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return await self._call(*arguments, **options)

    def go_on(self) -> None:
        self._open.set()


@pytest.mark.parametrize("error", [PermissionDeniedError("read only"), GenericError("full")])
def test_a_write_that_fails_fails_no_read(backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Where many reads are under way and more wait, a write that is refused or not answered lets each of them be answered."""
    backend.put("object", [np.arange(8, dtype=np.uint8)])
    get, put = Call(obstore.get_async), Call(obstore.put_async, error)
    monkeypatch.setattr(obstore, "get_async", get)
    monkeypatch.setattr(obstore, "put_async", put)
    written = THREADS.call(lambda: backend.put("other", [np.zeros(1, np.uint8)]))
    wait_until(lambda: put.begun == 1)
    reader = backend.reader()
    reader.request([ObjectRange("object", at % 8, at % 8 + 1) for at in range(REQUESTS + 8)])
    wait_until(lambda: get.begun >= REQUESTS - 1)
    put.go_on()
    with pytest.raises(RemoteError):
        written.result(WAIT_S)
    get.go_on()
    found = [reader.receive() for _ in range(REQUESTS + 8)]
    assert [None if data is None else data.tolist() for data in found] == [[at % 8] for at in range(REQUESTS + 8)]


@pytest.mark.parametrize(("error", "failed"), [(PermissionDeniedError("not yours"), 1), (GenericError("no connection"), 2)])
def test_a_refused_read_is_an_answer(
    backend: ObjectBackend, monkeypatch: pytest.MonkeyPatch, error: Exception, failed: int
) -> None:
    """A read that waits for another is given up where the store was silent towards that one, and not where it refused it."""
    backend.put("object", [np.arange(8, dtype=np.uint8)])
    get = Call(obstore.get_async, error)
    monkeypatch.setattr(obstore, "get_async", get)
    monkeypatch.setattr("cacheblend.store.remote.object_backend.REQUESTS", 1)
    one_by_one = ObjectBackend(backend._address, BackendLimits(timeout_s=WAIT_S))
    reader = one_by_one.reader()
    reader.request([ObjectRange("object", at, at + 1) for at in range(2)])
    wait_until(lambda: get.begun == 1)
    get.go_on()
    errors = 0
    for _ in range(2):
        try:
            reader.receive()
        except RemoteError:
            errors += 1
    one_by_one.close()
    assert errors == failed
