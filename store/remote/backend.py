"""Interface of a remote backend: objects by name, read in ranges that are asked for together and come one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from cacheblend.base.memory import Bytes

    from .address import RemoteAddress


MIN_BYTES_PER_S = 2**20  # of all that is under way; a remote that is slower for long is away


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendLimits:
    """Bounds of a backend's calls.

    Args:
        timeout_s: of silence: without an answer, to connect or for the next bytes. What flows may take longer.
        ttl_s: after which the backend drops an object that was put; None for never, or by the backend's own rules.
    """

    timeout_s: float
    ttl_s: int | None = None

    def bound_s(self, nbytes: int) -> float:
        """Seconds after which so many bytes do not come any more, though some of them may still."""
        return self.timeout_s + nbytes / MIN_BYTES_PER_S


class ObjectRange(NamedTuple):
    """The bytes of an object from `start` to `stop`, or to its end where that comes first."""

    name: str
    start: int
    stop: int


class RangeReader(Protocol):
    """Ranges over one connection, answered in the order in which they were asked for. Used by one thread; `abort` by any.

    Every method raises `RemoteError` where the remote does not answer, or not in time; then only `close` is allowed.
    """

    def request(self, ranges: Sequence[ObjectRange]) -> None:
        """Ask for ranges; does not wait for their bytes."""

    def receive(self) -> Bytes | None:
        """The bytes of the oldest range that was asked for, uint8 and not to be written to; None where there is no object."""

    def abort(self) -> None:
        """Have a call that another thread waits in end, by `RemoteError`."""

    def close(self) -> None:
        """Give the connection back, or end it where answers are still to come."""


class RemoteBackend(Protocol):
    """Objects by name on one server or in one bucket. Thread-safe.

    A backend is a class in a file of its own and a line in `REMOTE_BACKENDS`. Every method raises `RemoteError` where the
    remote refuses, does not answer, or not in time; the message has no secret.
    """

    def __init__(self, address: RemoteAddress, limits: BackendLimits) -> None: ...

    def reader(self) -> RangeReader:
        """A connection to read over."""

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Store an object of these bytes, uint8, one after the other, in place of one of that name; all of it or nothing."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Bytes of each object, None where there is none; in one round trip, or as many at once as the backend can."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error."""

    def ls(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of every object."""

    def close(self) -> None:
        """End all connections."""
