"""Whose KV a request may use."""

from __future__ import annotations

import hashlib

UNSALTED = ""  # ingested documents, and requests without a salt


def namespace_of(cache_salt: str) -> str:
    """The namespace of a cache salt: its SHA-256 in hex, "" for none.

    A salt comes from outside and may be a client's secret: its hash is what disk, logs and messages have, and is of one length.
    """
    return hashlib.sha256(cache_salt.encode()).hexdigest() if cache_salt else UNSALTED
