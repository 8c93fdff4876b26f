"""The nearest vectors, by FAISS.

Shapes: N vectors, D dimensions, K results.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np
import xxhash
from numpy.typing import NDArray

from cacheblend.base.errors import RetrieverError
from cacheblend.base.files import private_opener

_HEADER = struct.Struct("<8sq16s")  # magic, generation, xxh3-128 of what follows
_MAGIC = b"CBINDEX1"


class VectorIndex:
    """An exact L2 index whose vectors can be added and removed one by one.

    Flat, not approximate: a scan of 100,000 chunks takes milliseconds, while prefilling six of them takes seconds.
    """

    def __init__(self, dimensions: int) -> None:
        self._index: faiss.Index = faiss.IndexIDMap2(faiss.IndexFlatL2(dimensions))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return int(self._index.d)

    def add(self, ids: Sequence[int], vectors_ND: NDArray[np.float32]) -> None:
        """Add vectors under new ids."""
        self._index.add_with_ids(np.ascontiguousarray(vectors_ND, dtype=np.float32), np.asarray(ids, dtype=np.int64))

    def remove(self, ids: Sequence[int]) -> None:
        """Remove the vectors of these ids; the order of the others stays."""
        self._index.remove_ids(faiss.IDSelectorBatch(np.asarray(ids, dtype=np.int64)))

    def search(self, vector_D: NDArray[np.float32], top_k: int) -> tuple[list[int], list[float]]:
        """Ids and squared L2 distances of the K nearest vectors, nearest first, the lower id first among equals."""
        distances_1K, ids_1K = self._index.search(np.ascontiguousarray(vector_D, dtype=np.float32)[None], top_k)
        found = sorted(zip(distances_1K[0].tolist(), ids_1K[0].tolist(), strict=True))
        return [id_ for _, id_ in found], [distance for distance, _ in found]

    def save(self, path: Path, generation: int) -> None:
        """Write the index and the generation of the catalogue that it shows; a crash leaves the old file or the new one.

        Raises:
            OSError: the file cannot be written.

        """
        payload = faiss.serialize_index(self._index).tobytes()
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb", opener=private_opener) as file:
                file.write(_HEADER.pack(_MAGIC, generation, xxhash.xxh3_128_digest(payload)))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> tuple[VectorIndex, int]:
        """Read an index, and the generation of the catalogue that it shows.

        Raises:
            RetrieverError: the file is missing or damaged.

        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RetrieverError(f"{path} cannot be read: {error.strerror}") from error
        magic, generation, digest = _HEADER.unpack(data[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        payload = data[_HEADER.size :]
        if magic != _MAGIC or digest != xxhash.xxh3_128_digest(payload):
            raise RetrieverError(f"{path} is damaged or not an index")
        index = cls.__new__(cls)
        index._index = faiss.deserialize_index(np.frombuffer(payload, dtype=np.uint8))
        return index, generation
