"""Redis and Valkey as a remote backend: one string value an object, read by pipelined `GETRANGE`."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cacheblend.base.errors import ConfigError, RemoteError
from cacheblend.base.memory import Bytes

from .address import RemoteAddress
from .backend import BackendLimits, ObjectRange

KEY_PREFIX = b"cacheblend:"
READ_BYTES = 2**20  # of a socket at once
SEND_BYTES = 64 * 1024  # at once: the socket's time-out is for each send
LIST_KEYS = 512


@contextmanager
def _reporting(address: RemoteAddress) -> Iterator[None]:
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:  # an answer may be anything, and break the library anywhere
        # Only its kind: a message may have the URL, and what is chained the same.
        raise RemoteError(f"{address}: {type(error).__name__}{_said(error)}") from None


def _said(error: Exception) -> str:
    """What the server said of a command, which has no secret; nothing of what the library says."""
    return f" ({error})" if isinstance(error, redis.ResponseError) else ""


def _in_pieces(command: Iterable[bytes]) -> Iterator[memoryview]:
    return (memoryview(part)[at : at + SEND_BYTES] for part in command for at in range(0, len(part), SEND_BYTES))


class RedisBackend:
    """See `RemoteBackend`. The server may drop any value, by TTL or `maxmemory`: it is missing then."""

    def __init__(self, address: RemoteAddress, limits: BackendLimits) -> None:
        self._address, self._limits = address, limits
        try:
            self._pool = redis.ConnectionPool.from_url(
                address.url,
                socket_timeout=limits.timeout_s,
                socket_connect_timeout=limits.timeout_s,
                socket_read_size=READ_BYTES,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, TypeError):
            raise ConfigError("remote", f"{address} (its query is not shown)", "as redis-py takes a URL") from None
        self._client = redis.Redis(connection_pool=self._pool)

    def reader(self) -> RedisReader:
        """See `RemoteBackend`."""
        with _reporting(self._address):
            return RedisReader(self._pool, self._address, self._limits.timeout_s)

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """See `RemoteBackend`."""
        value = b"".join(part.data for part in parts)
        expiry = () if self._limits.ttl_s is None else ("EX", self._limits.ttl_s)
        with _reporting(self._address):
            connection: Any = self._pool.get_connection()
            try:
                command = connection.pack_command("SET", KEY_PREFIX + name.encode(), value, *expiry)
                connection.send_packed_command(_in_pieces(command), check_health=False)
                connection._sock.settimeout(self._limits.bound_s(len(value)))  # much of it may be in the system's buffer yet
                connection.read_response()
                connection._sock.settimeout(self._limits.timeout_s)
            except BaseException:
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See `RemoteBackend`."""
        with _reporting(self._address), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.strlen(KEY_PREFIX + name.encode())
            return [int(size) or None for size in pipeline.execute()]

    def delete(self, names: Iterable[str]) -> None:
        """See `RemoteBackend`."""
        if keys := [KEY_PREFIX + name.encode() for name in names]:
            with _reporting(self._address):
                self._client.unlink(*keys)

    def ls(self) -> Iterator[tuple[str, int]]:
        """See `RemoteBackend`."""
        with _reporting(self._address):
            seen: set[bytes] = set()  # a scan may give a key twice
            for key in self._client.scan_iter(match=KEY_PREFIX + b"*", count=LIST_KEYS):
                if key not in seen:
                    seen.add(key)
                    yield key[len(KEY_PREFIX) :].decode(errors="replace"), int(self._client.strlen(key))

    def close(self) -> None:
        """See `RemoteBackend`."""
        self._client.close()
        self._pool.disconnect()


class RedisReader:
    """See `RangeReader`."""

    def __init__(self, pool: Any, address: RemoteAddress, timeout_s: float) -> None:
        self._pool, self._address, self._timeout_s = pool, address, timeout_s
        self._connection = pool.get_connection()
        self._socket: socket.socket | None = self._connection._sock
        self._waiting: deque[ObjectRange] = deque()
        self._failed = False
        self._closing = threading.Lock()

    def request(self, ranges: Sequence[ObjectRange]) -> None:
        """See `RangeReader`."""
        commands = [("GETRANGE", KEY_PREFIX + name.encode(), start, stop - 1) for name, start, stop in ranges]
        with self._marking(), _reporting(self._address):
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        self._waiting.extend(ranges)

    def receive(self) -> Bytes | None:
        """See `RangeReader`."""
        with self._marking(), _reporting(self._address):
            data = self._connection.read_response(disable_decoding=True)
            if not isinstance(data, bytes):
                raise TypeError
        self._waiting.popleft()
        return np.frombuffer(data, np.uint8) if data else None

    def abort(self) -> None:
        """See `RangeReader`."""
        with self._closing:
            self._failed = True
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `RangeReader`."""
        with self._closing:  # from here on the socket may be another reader's
            connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            if self._failed or self._waiting:
                connection.disconnect()
            self._pool.release(connection)

    @contextmanager
    def _marking(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._failed = True
            raise
