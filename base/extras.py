"""Optional dependencies: the error for a missing package names the extra that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingExtraError


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Guard imports of packages that an extra brings.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "cacheblend":
            raise
        raise MissingExtraError(error.name, extra) from error
