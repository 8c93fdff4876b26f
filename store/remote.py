"""The remote tier: complete entries on a server or in an object store that machines share, fetched ahead of a blend.

An object is the file of an entry (docs/store.md). A deployment with a secret writes `SEAL` and a tag before it:
HMAC-SHA256 over the object's name and the file, with a key that follows from the secret and the tenant.
"""

import hashlib
import hmac
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from cacheblend.base.errors import ConfigError, DamagedEntryError, MissingExtraError, RemoteError, StoreError, needs_extra
from cacheblend.base.files import make_folder
from cacheblend.base.memory import Bytes
from cacheblend.base.options import check_user_info

from .entry import LENGTH_BYTES, EncodedEntry, pack_header, parse_header

logger = logging.getLogger(__name__)
T = TypeVar("T")
Load = Callable[[], EncodedEntry | None]
FETCHES = 16  # entries that are fetched at the same time
MAX_TRANSFER_S = 15.0  # of one object; the time-out of the configuration is for silence
MAX_HEADER_BYTES = 2**20  # of an object: about 100,000 token ids; without a secret anybody may have written it
MAX_CHANGES = 65_536  # that wait to be sent
MAX_ATTEMPTS = 3
FAILURES = 3  # in a row, after which the circuit breaker opens
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
KEY_PREFIX = "cacheblend:"  # in Redis
SEAL, TAG_BYTES = b"CBSEAL3\0", 32


class Backend(Protocol):
    """Objects by name on one server or in one bucket; thread-safe. A failed call raises an error of the library in use."""

    def get(self, name: str) -> Bytes | None:
        """The bytes of an object; None if there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Store an object in place of one of that name, in one step."""

    def contains(self, name: str) -> bool:
        """Whether there is an object of that name."""

    def delete(self, name: str) -> None:
        """Remove an object; a missing one is no error."""

    def close(self) -> None: ...


class _ObjectBackend:
    """Objects through obstore (S3, Google Cloud Storage, Azure, a folder), with keys and end points from the environment."""

    def __init__(self, url: str, timeout_s: float, limit_bytes: int) -> None:
        import obstore

        self._obstore: Any = obstore
        self._limit_bytes = limit_bytes
        # An upload has no answer before its last byte, so writes have no time-out for silence.
        self._reads, self._writes = self._open(url, timeout_s, {"read_timeout": timeout_s}), self._open(url, timeout_s, {})

    def get(self, name: str) -> Bytes | None:
        try:
            found = self._obstore.get(self._reads, self._path_of(name))
        except FileNotFoundError:
            return None
        if found.meta["size"] > self._limit_bytes:  # nothing of it is read
            return np.empty(0, np.uint8)
        return np.frombuffer(memoryview(found.bytes()), np.uint8)

    def put(self, name: str, data: bytes) -> None:
        self._obstore.put(self._writes, self._path_of(name), data)

    def contains(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self._obstore.head(self._reads, self._path_of(name)))
        return False

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._obstore.delete(self._writes, self._path_of(name))

    def close(self) -> None:
        pass  # obstore has no connection that must be ended

    @staticmethod
    def _path_of(name: str) -> str:
        return f"{name[:2]}/{name}"  # file systems are slow with many files in one folder

    @staticmethod
    def _open(url: str, timeout_s: float, limits_s: dict[str, float]) -> Any:
        from obstore.store import from_url

        if urlsplit(url).scheme == "file":
            make_folder(Path(unquote(urlsplit(url).path)))  # obstore would make it for everybody
            return from_url(url)
        limits_s = {"connect_timeout": timeout_s, "timeout": MAX_TRANSFER_S, **limits_s}
        # The environment may name an end point without TLS; the providers' own have TLS.
        options: Any = {"allow_http": True, **{name: timedelta(seconds=limit_s) for name, limit_s in limits_s.items()}}
        retries: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)}
        return from_url(url, client_options=options, retry_config=retries)


class _RedisBackend:
    """Redis and Valkey: a string value for each object. The server may drop any of them (`maxmemory`)."""

    def __init__(self, url: str, timeout_s: float, limit_bytes: int) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        connect = partial(redis.Redis.from_url, url, socket_connect_timeout=timeout_s, socket_read_size=2**20, protocol=2)
        # The time-out of a socket is for each read, and for all bytes of a write together.
        self._reads = connect(socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))
        self._writes = connect(socket_timeout=MAX_TRANSFER_S, retry=Retry(NoBackoff(), 0))

    def get(self, name: str) -> Bytes | None:
        data: Any = self._reads.get(KEY_PREFIX + name)
        return None if data is None else np.frombuffer(data, np.uint8)

    def put(self, name: str, data: bytes) -> None:
        self._writes.set(KEY_PREFIX + name, data)

    def contains(self, name: str) -> bool:
        return bool(self._reads.exists(KEY_PREFIX + name))

    def delete(self, name: str) -> None:
        self._writes.unlink(KEY_PREFIX + name)

    def close(self) -> None:
        self._reads.close()
        self._writes.close()


# Scheme of a URL: its backend, and the extra that brings the backend's library, or None.
BACKENDS: dict[str, tuple[Callable[[str, float, int], Backend], str | None]] = {
    **dict.fromkeys(("redis", "rediss", "unix"), (_RedisBackend, "redis")),
    **dict.fromkeys(("s3", "gs", "az", "file"), (_ObjectBackend, "objects")),
}
SCHEMES = ", ".join(f"{scheme}://" for scheme in BACKENDS)


class RemoteAddress:
    """Address of a remote tier: a URL of a scheme in `BACKENDS`, whose user, password and query no text shows.

    Raises:
        ConfigError: another scheme, nothing after it, or a password or a folder's name that is not percent-encoded.
    """

    def __init__(self, url: str) -> None:
        url = url if isinstance(url, str) else ""
        if not url.startswith("file:///"):  # which has no password, and a folder may have any name
            check_user_info("remote", url)
        parts = urlsplit(url)
        if parts.scheme not in BACKENDS or not (parts.netloc or parts.path.strip("/")):
            raise ConfigError("remote", "what is given (not shown)", f"a URL that begins with one of {SCHEMES}")
        if parts.scheme == "file" and (parts.netloc or "?" in url or "#" in url):  # it would name another folder
            allowed = "file:///folder; percent-encode % (%25), ? (%3F) and # (%23) in its name"
            raise ConfigError("remote", "what is given (not shown)", allowed)
        self.url, self.scheme = url, parts.scheme
        self.shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def open(self, timeout_s: float, limit_bytes: int) -> Backend:
        """A backend, which connects at its first use; an object beyond the limit reads as empty.

        Raises:
            MissingExtraError, ConfigError: its library is not installed, or does not accept the URL.
        """
        make, extra = BACKENDS[self.scheme]
        try:
            with needs_extra(extra) if extra else nullcontext():
                return make(self.url, timeout_s, limit_bytes)
        except MissingExtraError:
            raise
        except Exception as error:  # its message may show the URL
            allowed = f"a URL that the library accepts ({type(error).__name__})"
            raise ConfigError("remote", f"{self.shown} (its query is not shown)", allowed) from None


class ObjectFormat:
    """Names and bytes of objects.

    Without a secret of the deployment, names follow from tenant and key, and there is no tag. Equal entries of two tenants are
    two objects, so that a tenant finds and deletes nothing but its own.
    """

    def __init__(self, secret: bytes | None, tenant: str | None = None) -> None:
        self._tenant = tenant
        if secret is not None and tenant is not None:
            secret = hmac.digest(secret, b"tenant\0" + tenant.encode(), "sha256")
        self._keys = None if secret is None else tuple(hmac.digest(secret, use, "sha256") for use in (b"names", b"tags"))

    def name(self, digest: str) -> str:
        """The name of an entry's object."""
        if self._keys is not None:
            return hmac.digest(self._keys[0], digest.encode(), "sha256").hex()
        return digest if self._tenant is None else hashlib.sha256(f"{self._tenant}\0{digest}".encode()).hexdigest()

    def pack(self, entry: EncodedEntry) -> bytes:
        """The bytes of an entry's object; raises `StoreError` if the header is longer than `MAX_HEADER_BYTES`."""
        header = pack_header(entry.info, entry.checksums)
        if len(header) > MAX_HEADER_BYTES:
            raise StoreError(f"a chunk of {len(entry.info.token_ids)} tokens is too long for the remote tier")
        parts: list[bytes | memoryview] = [header, *(stored.reshape(-1).data for stored in entry.bytes)]
        if self._keys is not None:
            parts = [SEAL, self._tag(self._keys[1], self.name(entry.info.key.digest), parts), *parts]
        return b"".join(parts)

    def unpack(self, digest: str, data: Bytes) -> EncodedEntry:
        """The entry of an object, checked: its tag, its key, and the checksum of every layer.

        Raises:
            DamagedEntryError: this deployment did not write these bytes for this entry.
        """
        name = self.name(digest)
        if self._keys is not None:
            tag, data = data[: len(SEAL) + TAG_BYTES], data[len(SEAL) + TAG_BYTES :]
            if not hmac.compare_digest(tag.tobytes(), SEAL + self._tag(self._keys[1], name, [data.data])):
                raise DamagedEntryError(f"object {name} was not written with this deployment's secret, or altered")
        header_bytes = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
        if not LENGTH_BYTES < header_bytes <= min(MAX_HEADER_BYTES, len(data)):
            raise DamagedEntryError(f"object {name} of {len(data)} bytes has a header of {header_bytes}")
        try:
            info, checksums = parse_header(data[LENGTH_BYTES:header_bytes].tobytes(), digest)
            if info.key != info.key_for(info.key.model) or info.model not in (None, info.key.model):
                raise ValueError("its key is that of other tokens")
            if len(data) - header_bytes != info.nbytes:  # before memory is allocated for them
                raise ValueError(f"its layers have {len(data) - header_bytes} bytes, not {info.nbytes}")
            entry = EncodedEntry(info, checksums)
            layers = np.split(data[header_bytes:], np.cumsum(info.sizes)[:-1])
            for view, stored in zip(entry.bytes, layers, strict=True):
                np.copyto(view, stored.reshape(view.shape))
            entry.check()
            return entry
        except ValueError as error:  # `InputError`, and text that is not Unicode
            raise DamagedEntryError(f"object {name} is damaged: {error}") from error

    @staticmethod
    def _tag(key: bytes, name: str, parts: Iterable[bytes | memoryview]) -> bytes:
        mac = hmac.new(key, name.encode(), hashlib.sha256)
        for part in parts:
            mac.update(part)
        return mac.digest()


class CircuitBreaker:
    """Stops calls to a remote that failed `FAILURES` times in a row, for a pause that doubles with each further failure."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures, self._open_until = 0, 0.0

    def pause_left_s(self) -> float:
        """Seconds until a call is allowed; 0 for now."""
        return max(0.0, self._open_until - self._clock())

    def succeed(self) -> None:
        with self._lock:
            self._failures, self._open_until = 0, 0.0

    def fail(self) -> bool:
        """Note that a call was not answered; True if no calls are made from now on for a while."""
        with self._lock:
            if self.pause_left_s():  # a call from before the pause
                return False
            self._failures += 1
            if self._failures >= FAILURES:
                self._open_until = self._clock() + min(FIRST_PAUSE_S * 2 ** min(self._failures - FAILURES, 10), MAX_PAUSE_S)
            return self._failures >= FAILURES


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Counts of a remote tier since this process opened the store."""

    state: str  # of the circuit breaker: "closed" if the remote is asked, "open" if its entries are misses for a while
    hits: int = 0  # entries that were fetched
    misses: int = 0  # entries that were asked for and not there
    failures: int = 0  # calls that were refused, or not answered in time
    damaged: int = 0  # entries whose bytes were not what was written
    read_bytes: int = 0
    sent: int = 0  # entries that were written
    sent_bytes: int = 0
    dropped_writes: int = 0  # changes that were not made: the remote did not answer, too many waited, or the entry is gone
    pending_writes: int = 0


class RemoteTier:
    """Entries on a server or in an object store, which make misses and no errors if it does not answer. Thread-safe.

    A thread sends entries and removals; a change that fails `MAX_ATTEMPTS` times, or has `MAX_CHANGES` before it, is dropped
    and counted. No entry that waits is held in memory.
    """

    def __init__(self, address: RemoteAddress, backend: Backend, objects: ObjectFormat, timeout_s: float) -> None:
        self._address, self._backend, self._format, self._timeout_s = address.shown, backend, objects, timeout_s
        self._reads, self._writes = CircuitBreaker(), CircuitBreaker()  # a full server still answers reads
        # A process waits for the end of calls that are under way: obstore must not return to an interpreter that has ended.
        self._readers, self._writer = ThreadPoolExecutor(FETCHES, "cacheblend-remote"), ThreadPoolExecutor(1)
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._arrivals: dict[str, Future[bool]] = {}
        self._wanted_until: dict[str, float] = {}  # of arrivals: the deadline of the last request
        self._changes: OrderedDict[str, Load | None] = OrderedDict()  # by digest; None removes
        self._is_fetching = self._is_sending = True
        self._sender: threading.Thread | None = None

    def fetch(self, digests: Iterable[str], store: Callable[[EncodedEntry], bool], deadline_s: float) -> list[Future[bool]]:
        """Begin to fetch entries, side by side, by a deadline. An entry that is on its way already is not fetched twice.

        `store` is called in a thread with each entry that came, and returns whether the entry is stored now: so do the futures,
        one for each entry that may come.
        """
        with self._changed:
            asked = self._askable(digests)
            for digest in asked:
                self._wanted_until[digest] = max(self._wanted_until.get(digest, 0.0), time.monotonic() + deadline_s)
                if digest not in self._arrivals:
                    self._arrivals[digest] = self._readers.submit(self._fetch, digest, store)
            return [self._arrivals[digest] for digest in asked]

    def contains(self, digests: Iterable[str]) -> set[str]:
        """The entries among these that the remote says, `FETCHES` within each time-out, that it has."""
        with self._changed:
            answers = {self._readers.submit(self._has, digest): digest for digest in self._askable(digests)}
        answered, late = wait(answers, self._timeout_s * -(-len(answers) // FETCHES))
        for answer in late:
            answer.cancel()
        return {answers[answer] for answer in answered if answer.exception() is None and answer.result()}

    def put(self, digest: str, load: Load | None) -> None:
        """Have an entry sent if `load` finds it then, or removed first for None, in place of an earlier change of it."""
        with self._changed:
            if not self._is_sending or (load and len(self._changes) >= MAX_CHANGES and digest not in self._changes):
                self._counts["dropped_writes"] += 1
                return
            self._changes[digest] = load
            if load is None:
                self._changes.move_to_end(digest, last=False)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_all, name="cacheblend-remote-writes", daemon=True)
                self._sender.start()
            self._changed.notify_all()

    def send(self, entry: EncodedEntry) -> None:
        """Send an entry now; raises `RemoteError` if the remote refuses it or is silent, `StoreError` if it is too long."""
        digest, data = entry.info.key.digest, self._format.pack(entry)
        self._call(self._writes, self._backend.put, self._format.name(digest), data)
        self._count(sent=1, sent_bytes=len(data))

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until no change waits; False after the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._changes, timeout_s)

    def drain(self) -> None:
        """Wait until no change waits, as long as the remote makes one within `MAX_TRANSFER_S`."""
        left = 0
        with self._changed:
            while left != len(self._changes) and not self._writes.pause_left_s():
                left = len(self._changes)
                self._changed.wait_for(lambda: not self._changes or self._writes.pause_left_s(), MAX_TRANSFER_S)

    def stats(self) -> RemoteStats:
        """Counts since it was opened."""
        with self._changed:
            breaker = "open" if self._reads.pause_left_s() else "closed"
            return RemoteStats(breaker, **self._counts, pending_writes=len(self._changes))

    def stop_fetching(self) -> None:
        """Fetch nothing more; what comes later is not stored."""
        with self._changed:
            self._is_fetching = False
            self._readers.shutdown(wait=False, cancel_futures=True)
            for digest in [digest for digest, arrival in self._arrivals.items() if arrival.cancelled()]:
                self._arrivals.pop(digest).set_running_or_notify_cancel()  # wakes who waits for it

    def close(self) -> None:
        """Send what waits (see `drain`), and end all connections."""
        self.stop_fetching()
        self.drain()
        with self._changed:
            self._is_sending, left = False, self._changes.copy()
            self._changes.clear()
            self._changed.notify_all()
        with suppress(RemoteError):  # a full server, which refuses entries, makes removals still
            for digest in [digest for digest, load in left.items() if load is None]:
                left.pop(digest, self._make(digest, None))
        self._count(dropped_writes=len(left))
        if dropped := self._counts["dropped_writes"]:
            logger.warning("%d changes were not made in the remote tier", dropped)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._backend.close()

    def _askable(self, digests: Iterable[str]) -> list[str]:
        """The entries among these to ask for now: none that is being removed, and none while the remote is silent."""
        if not self._is_fetching or self._reads.pause_left_s():
            return []
        return [digest for digest in dict.fromkeys(digests) if self._changes.get(digest, digest) is not None]

    def _count(self, **counts: int) -> None:
        with self._changed:
            self._counts.update(counts)

    def _call(self, breaker: CircuitBreaker, call: Callable[..., T], *args: object) -> T:
        """Call the backend, and note how that ended; raises `RemoteError`, whose message shows no secret."""
        try:
            result = call(*args)
        except Exception as error:  # the libraries have many kinds, and some messages show URLs with keys in them
            self._count(failures=1)
            if breaker.fail():
                logger.warning("the remote tier at %s is not asked for a while: %s", self._address, type(error).__name__)
            said = f" ({error})" if type(error).__name__ == "ResponseError" else ""  # Redis's answer to a command
            raise RemoteError(f"{self._address}: {type(error).__name__}{said}") from None
        breaker.succeed()
        return result

    def _has(self, digest: str) -> bool:
        return not self._reads.pause_left_s() and self._call(self._reads, self._backend.contains, self._format.name(digest))

    def _fetch(self, digest: str, store: Callable[[EncodedEntry], bool]) -> bool:
        """Fetch an entry, check it and have it stored; whether it is. Nothing is fetched that nobody waits for any more."""
        try:
            name, is_late = self._format.name(digest), time.monotonic() > self._wanted_until[digest]
            if is_late or self._reads.pause_left_s() or (data := self._call(self._reads, self._backend.get, name)) is None:
                self._count(misses=1)
                return False
            entry = self._format.unpack(digest, data)
            self._count(hits=1, read_bytes=len(data))
            return store(entry)
        except DamagedEntryError as error:
            self._count(damaged=1)
            level = logging.WARNING if self._counts["damaged"] == 1 else logging.DEBUG  # one line, and the counter
            logger.log(level, "an entry in the remote tier at %s is damaged, and a miss: %s", self._address, error)
        except Exception as error:  # the remote does not answer, the store is closed or full; or memory is short
            level = logging.DEBUG if isinstance(error, StoreError) else logging.ERROR
            logger.log(level, "entry %s was not fetched: %s: %s", digest, type(error).__name__, error)
        finally:
            with self._changed:
                self._arrivals.pop(digest, None)
                self._wanted_until.pop(digest, None)
        return False

    def _send_all(self) -> None:
        """Make one change after the other, in their order, until the tier is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._changes or not self._is_sending)
                if not self._changes:
                    return
                digest, load = next(iter(self._changes.items()))
            try:
                is_made = self._try(digest, load)
            except RuntimeError:  # no call begins any more: the process ends
                is_made = False
            with self._changed:
                if self._changes.get(digest, digest) is load:  # and no later change in its place
                    del self._changes[digest]
                    self._counts["dropped_writes"] += not is_made
                    self._changed.notify_all()

    def _try(self, digest: str, load: Load | None) -> bool:
        """Make a change in a few attempts; whether it is made. A `RuntimeError` says that the process ends."""
        for attempt in range(MAX_ATTEMPTS):
            with self._changed:
                self._changed.notify_all()  # the breaker may be open
                pause_s = max(self._writes.pause_left_s(), attempt * FIRST_PAUSE_S)
                if self._changed.wait_for(lambda: not self._is_sending, pause_s):
                    return False
                if self._changes.get(digest, digest) is not load:  # a later change has come in its place
                    return False
            made = self._writer.submit(self._make, digest, load)
            try:
                return made.result()
            except Exception as error:  # also too long an entry, no memory, a tier that is closed: the thread goes on
                level = logging.DEBUG if isinstance(error, RemoteError) else logging.WARNING
                logger.log(level, "a change was not made in the remote tier: %s: %s", type(error).__name__, error)
        return False

    def _make(self, digest: str, load: Load | None) -> bool:
        """Make a change; False where the entry to send is gone by now. Raises as `send` and `load` do."""
        if load is None:
            self._call(self._writes, self._backend.delete, self._format.name(digest))
        elif (entry := load()) is not None:
            self.send(entry)
        return load is None or entry is not None
