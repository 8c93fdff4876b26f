"""Object stores as a remote backend, through obstore: S3 and what speaks it, Google Cloud Storage, Azure, a folder."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from contextvars import Context
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, from_url

from cacheblend.base.errors import ConfigError, RemoteError
from cacheblend.base.memory import Bytes

from .address import RemoteAddress
from .backend import BackendLimits, ObjectRange

if TYPE_CHECKING:
    from obstore.store import ClientConfig

T = TypeVar("T")
REQUESTS = 32  # under way at once
LET_GO_S, CANCELLED_S = 1.0, 0.05  # that threads of the library are waited for at the end, with a result and without
FOLDERS = 2  # hexadecimal digits of a name that are its folder: file systems are slow with many files in one


@contextmanager
def _reporting(address: RemoteAddress) -> Iterator[None]:
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:  # the library has many kinds, some of which show URLs with keys in them
        raise RemoteError(f"{address}: {type(error).__name__}") from None


class _EventLoop(asyncio.SelectorEventLoop):
    """An event loop that knows which threads are in the midst of handing it something.

    The library's threads hand over results, which lets go of the interpreter's lock for a moment. A thread that wants it back
    while the interpreter ends brings the process down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handing_over: set[int] = set()

    def call_soon_threadsafe(  # type: ignore[override]  # without a variadic type: its arguments are handed on as they are
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop`."""
        self.handing_over.add(threading.get_ident())
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        finally:
            self.handing_over.discard(threading.get_ident())


class _Requests:
    """Requests of a kind: so many are under way at once, and where the remote is silent those that wait are not tried too."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(REQUESTS)
        self._answered = self._silent = 0

    async def bounded(self, request: Callable[[], Awaitable[T]], bound_s: float) -> T:
        """Await a request once fewer than `REQUESTS` others are under way; raises `TimeoutError` after the time."""
        answered, silent = self._answered, self._silent
        async with self._slots:
            if self._silent > silent and self._answered == answered:  # all that were before it: do not wait as long again
                raise TimeoutError
            try:
                async with asyncio.timeout(bound_s):
                    result = await request()
            except (TimeoutError, GenericError):  # the library's for connections, too
                self._silent += 1
                raise
            except Exception:  # a refusal is an answer
                self._answered += 1
                raise
            self._answered += 1
            return result


class _Loop:
    """An asyncio loop in a thread of its own, for requests that are under way together."""

    def __init__(self) -> None:
        self._loop = _EventLoop()
        self._thread = threading.Thread(target=self._run, name="cacheblend-objects", daemon=True)
        self._thread.start()
        # A remote that takes no writes, since it is full or they are not allowed, may answer reads.
        self.reads, self.writes = _Requests(), _Requests()
        self._changing = threading.Lock()
        self._closed = False
        _OPEN.add(self)

    def begin(self, task: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a task; its result comes in the future, an error where the loop is closed by then."""
        with self._changing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(task, self._loop)
        task.close()
        raise RemoteError("the remote tier is closed")

    def close(self) -> None:
        """Cancel what is under way, and end the thread; a second call does nothing."""
        with self._changing:
            if self._closed or sys.is_finalizing():  # then the interpreter has ended the thread, in the midst of the loop
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join()
        deadline = time.monotonic() + LET_GO_S
        while self._loop.handing_over and time.monotonic() < deadline:
            time.sleep(0.001)
        if ending.result():  # the library's threads find out that nobody wants their result
            time.sleep(CANCELLED_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> int:
        """Cancel all, have those who wait for it know, and give how many there were."""
        tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)
        return len(tasks)


_OPEN: weakref.WeakSet[_Loop] = weakref.WeakSet()


@atexit.register
def _close_open() -> None:
    for loop in list(_OPEN):
        loop.close()


class ObjectBackend:
    """See `RemoteBackend`. Keys, regions and end points come from the environment, as each provider's tools have them."""

    def __init__(self, address: RemoteAddress, limits: BackendLimits) -> None:
        self._address, self._limits = address, limits
        try:
            self._store, self._writes = self._open(limits.timeout_s), self._open(None)
        except Exception as error:
            raise ConfigError("remote", str(address), f"as obstore takes a URL ({type(error).__name__})") from None
        self._loop = _Loop()

    def reader(self) -> ObjectReader:
        """See `RemoteBackend`."""
        return ObjectReader(self)

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """See `RemoteBackend`."""
        data = b"".join(part.data for part in parts)

        async def put() -> None:
            await obstore.put_async(self._writes, path_of(name), data)

        self.result(self._loop.begin(self._loop.writes.bounded(put, self._limits.bound_s(len(data)))))

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See `RemoteBackend`."""

        async def size(name: str) -> int | None:
            try:
                return (await obstore.head_async(self._store, path_of(name)))["size"]
            except FileNotFoundError:
                return None

        return self._each(self._loop.reads, size, names)

    def delete(self, names: Iterable[str]) -> None:
        """See `RemoteBackend`."""

        async def delete(name: str) -> None:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._store, path_of(name))

        self._each(self._loop.writes, delete, names)

    def ls(self) -> Iterator[tuple[str, int]]:
        """See `RemoteBackend`."""
        with _reporting(self._address):
            for page in obstore.list(self._store):
                for found in page:
                    name = found["path"].rpartition("/")[2]
                    if found["path"] == path_of(name):
                        yield name, found["size"]

    def close(self) -> None:
        """See `RemoteBackend`."""
        self._loop.close()

    def begin(self, one: ObjectRange) -> Future[Bytes | None]:
        """Begin to read a range; the library's errors come in the future."""

        async def get() -> Bytes | None:
            try:
                found = await obstore.get_async(self._store, path_of(one.name), options={"range": (one.start, one.stop)})
                return np.frombuffer(memoryview(await found.bytes_async()), np.uint8)
            except FileNotFoundError:
                return None

        # As many others may share the network with it.
        return self._loop.begin(self._loop.reads.bounded(get, self._limits.bound_s(REQUESTS * (one.stop - one.start))))

    def result(self, future: Future[T]) -> T:
        """What a request gave; raises `RemoteError` for what it raised, or its end."""
        with _reporting(self._address):
            try:
                return future.result()
            except (TimeoutError, CancelledError):
                raise RemoteError(f"{self._address} did not answer in time") from None

    def _each(self, kind: _Requests, request: Callable[[str], Awaitable[T]], names: Iterable[str]) -> list[T]:
        """What a request gives for each object, many at once."""

        async def requests() -> list[T]:
            timeout_s = self._limits.timeout_s
            return await asyncio.gather(*(kind.bounded(partial(request, name), timeout_s) for name in names))

        return self.result(self._loop.begin(requests()))

    def _open(self, silence_s: float | None) -> Any:
        """The library's store, whose requests end when nothing is answered for so long.

        It counts an upload's seconds from its first byte, not from its last: uploads have `BackendLimits.bound_s` alone.
        """
        url = urlsplit(self._address.url)
        if url.scheme == "file":
            return LocalStore(unquote(url.path), mkdir=True)
        timeout = timedelta(seconds=self._limits.timeout_s)
        options: ClientConfig = {
            "connect_timeout": timeout,
            "timeout": timedelta(days=1),  # of a whole request, 30 s by default; `_Requests.bounded` has it by its bytes
            "allow_http": True,  # an end point of the environment says which; TLS is the default of all providers
        }
        if silence_s is not None:
            options["read_timeout"] = timedelta(seconds=silence_s)
        return from_url(self._address.url, client_options=options, retry_config={"max_retries": 0, "retry_timeout": timeout})


class ObjectReader:
    """See `RangeReader`: every range is a request, many of which are under way together."""

    def __init__(self, backend: ObjectBackend) -> None:
        self._backend = backend
        self._waiting: deque[Future[Bytes | None]] = deque()

    def request(self, ranges: Sequence[ObjectRange]) -> None:
        """See `RangeReader`."""
        self._waiting.extend(map(self._backend.begin, ranges))

    def receive(self) -> Bytes | None:
        """See `RangeReader`."""
        try:
            return self._backend.result(self._waiting[0])  # where `abort` finds it
        finally:
            self._waiting.popleft()

    def abort(self) -> None:
        """See `RangeReader`."""
        for future in list(self._waiting):
            future.cancel()

    def close(self) -> None:
        """See `RangeReader`."""
        self.abort()
        self._waiting.clear()


def path_of(name: str) -> str:
    """Where the object of a name is."""
    return f"{name[:FOLDERS]}/{name}"
