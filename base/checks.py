"""Checks of options' values, each of which raises `ConfigError` with field, value and what is allowed; units of bytes."""

from __future__ import annotations

import math
from typing import TypeGuard
from urllib.parse import urlsplit

from .errors import ConfigError

MIB, GIB = 2**20, 2**30


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_whole(name: str, value: object, *, at_least: int = 1) -> None:
    """Refuse a value that is not an integer of at least `at_least`.

    Raises:
        ConfigError: the value is none.
    """
    if not is_whole(value) or value < at_least:
        raise ConfigError(name, value, f"a whole number of at least {at_least}")


def check_user_info(name: str, url: str) -> None:
    """Refuse a URL in which part of a password could be read as host or path; the message does not show it.

    Raises:
        ConfigError: an "@" stands after the host, or more than one before it.
    """
    try:
        parts = urlsplit(url)
        good = parts.netloc.count("@") <= 1 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:  # for example brackets without an address
        good = False
    if not good:
        allowed = 'one "@", before the host; percent-encode all others, and in a password also / (%2F), ? (%3F) and # (%23)'
        raise ConfigError(name, "what is given (not shown)", allowed)


def check_bytes(name: str, value: object) -> None:
    """Refuse a value that is not a byte budget.

    Raises:
        ConfigError: the value is not an integer above 0.
    """
    if not is_whole(value) or value <= 0:
        raise ConfigError(name, value, "give a whole number of bytes above 0")


def check_share(name: str, value: object) -> None:
    """Refuse a value that is not a share.

    Raises:
        ConfigError: the value is not a number from 0 to 1.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise ConfigError(name, value, "a number from 0 to 1")
