"""Keys of chunks' KV: hashes of everything that it depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend.base.errors import ConfigError, InputError

from .codecs import CODECS

KEY_FORMAT = 1
_MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The key of one chunk's KV; `str(key)` is its SHA-256 in hex. Make one with `ChunkKey.of`.

    Args:
        digest: the hash.
        model: fingerprint of the model that computes the KV.
        codec: how the KV is stored.
        namespace: whose entry it is; tenants with different namespaces never see each other's entries.

    """

    digest: str
    model: str
    codec: str
    namespace: str

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        *,
        prefix_ids: Sequence[int] = (),
        context: str = "",
        model: str,
        codec: str = "raw",
        namespace: str = "",
    ) -> ChunkKey:
        """The key of a chunk's KV.

        Args:
            token_ids: the chunk's own token ids.
            prefix_ids: the token ids that stand before it while its KV is computed.
            context: names what stands between those and the chunk; see `context_digest`.
            model: fingerprint of the model.
            codec: one of `CODECS`.
            namespace: whose entry it is.

        Raises:
            ConfigError: an unknown codec.
            InputError: no token ids, or an id that is not in 0..2**63-1.

        """
        if codec not in CODECS:
            raise ConfigError("codec", codec, f"use one of {', '.join(sorted(CODECS))}")
        if not len(token_ids):
            raise InputError("a ChunkKey needs at least one token id; got none")
        fields = (
            struct.pack("<q", KEY_FORMAT),
            model.encode(),
            codec.encode(),
            _packed("prefix_ids", prefix_ids),
            _packed("token_ids", token_ids),
            namespace.encode(),
            *([context.encode()] if context else []),
        )
        return cls(hashlib.sha256(length_prefixed(fields)).hexdigest(), model, codec, namespace)

    def __str__(self) -> str:
        return self.digest


def length_prefixed(fields: Iterable[bytes]) -> bytes:
    """Fields, each after its length in bytes, so that no two lists of fields give the same bytes."""
    return b"".join(struct.pack("<q", len(field)) + field for field in fields)


def context_digest(filler_ids: Sequence[int], earlier: Iterable[Sequence[int]]) -> str:
    """Names the context of a chunk's KV: 128 bits of a SHA-256, in hex; empty for none.

    Args:
        filler_ids: token ids of filler passages.
        earlier: token ids of each chunk of the document that stood between them and the chunk.
    """
    texts = [filler_ids, *earlier]
    if not any(map(len, texts)):
        return ""
    digest = hashlib.sha256()
    for token_ids in (filler_ids, [token for chunk in texts[1:] for token in chunk]):
        digest.update(struct.pack("<q", len(token_ids)))
        digest.update(np.asarray(token_ids, dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


def _packed(name: str, ids: Sequence[int]) -> bytes:
    """Ids as little-endian int64."""
    values = [int(token) for token in ids]
    for token in values:
        if not 0 <= token <= _MAX_ID:
            raise InputError(f"{name} holds {token}: token ids are whole numbers from 0 to 2**63-1")
    return struct.pack(f"<{len(values)}q", *values)
