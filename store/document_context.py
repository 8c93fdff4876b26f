"""What a chunk's own document does to it: known where a document is precomputed, of use wherever the chunk stands again.

Shapes: T tokens of the chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class DocumentContext:
    """How far each token's KV, computed alone, is from its KV behind the earlier text of its document.

    Attributes:
        before: `token_digest` of each chunk that stood before this one.
        deviation: per token of the chunk, the squared difference of keys relative to the keys' square, plus the same of values,
            in the mean over layers 1 and up; T numbers, 0 where the text before changes nothing.
    """

    before: tuple[str, ...]
    deviation: tuple[float, ...]


def token_digest(token_ids: Iterable[int]) -> str:
    """Names a run of token ids: the first 128 bits of their SHA-256, in hex."""
    return hashlib.sha256(np.fromiter(token_ids, dtype="<i8").tobytes()).digest()[:_DIGEST_BYTES].hex()
