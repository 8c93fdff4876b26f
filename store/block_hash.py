"""What names a block of a prompt's KV: a hash chained over all that the KV depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np

BLOCK_TOKENS = 16
BLOCK_FORMAT = 1


def chain_root(*fields: bytes) -> bytes:
    """The hash that a chain's first block has for its parent: SHA-256 over fields such as the model's fingerprint.

    Chains of different roots have no block in common.
    """
    return hashlib.sha256(_packed((struct.pack("<q", BLOCK_FORMAT), *fields))).digest()


class BlockChain:
    """SHA-256 of each full block of a token sequence, over its parent's hash, its tokens and the extra keys; it can grow.

    Args:
        root: see `chain_root`.
        extra_keys: bytes of the caller's that the KV depends on beside the tokens, or that keep it apart from others': an
            adapter's id, the hash of an image, a cache salt.
    """

    def __init__(self, root: bytes, extra_keys: Sequence[bytes] = ()) -> None:
        self._root, self._extra_keys = root, _packed(extra_keys)
        self._rest: list[int] = []
        self.digests: list[bytes] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens; those that fill no block yet wait for more."""
        self._rest += token_ids
        full = len(self._rest) // BLOCK_TOKENS * BLOCK_TOKENS
        packed = np.array(self._rest[:full], dtype="<i8").tobytes()
        size = 8 * BLOCK_TOKENS
        for start in range(0, len(packed), size):
            parent = self.digests[-1] if self.digests else self._root
            self.digests.append(hashlib.sha256(parent + packed[start : start + size] + self._extra_keys).digest())
        del self._rest[:full]


def _packed(fields: Sequence[bytes]) -> bytes:
    """The fields behind their number, each behind its length, so that no two lists of fields give the same bytes."""
    return struct.pack("<q", len(fields)) + b"".join(struct.pack("<q", len(field)) + field for field in fields)
