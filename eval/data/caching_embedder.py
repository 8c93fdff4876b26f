"""Vectors of texts that were embedded before, in the user's cache folder: a corpus of thousands of passages takes minutes."""

import hashlib
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cacheblend.base.files import make_private_file, user_cache_folder
from cacheblend.retriever import Embedder

logger = logging.getLogger(__name__)
BUSY_S = 30.0  # another run writes


class CachingEmbedder:
    """An embedder that stores another one's vectors in a file, by a digest of the text. A broken file is not used.

    Args:
        embedder: the other one.
        file: of the vectors, made if missing; None is `embeddings.sqlite` in the user's cache folder.
    """

    def __init__(self, embedder: Embedder, file: Path | None = None) -> None:
        self._embedder = embedder
        self._file = file or user_cache_folder() / "embeddings.sqlite"

    @property
    def name(self) -> str:
        """The other embedder's."""
        return self._embedder.name

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        return self._embedder.dimensions

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of the texts, float32 (N, D), of unit length."""
        keys = [hashlib.sha256(f"{self.name}\0{text}".encode(errors="surrogatepass")).digest() for text in texts]
        known = self._read(keys)
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        if new:
            made = dict(zip(new, np.asarray(self._embedder.encode(list(new.values())), dtype=np.float32), strict=True))
            self._write(made)
            known |= made
        return np.stack([known[key] for key in keys]) if keys else np.empty((0, self.dimensions), dtype=np.float32)

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, NDArray[np.float32]]:
        length = self.dimensions
        try:
            with closing(self._open()) as database:
                rows = [(key, database.execute("SELECT vector FROM vectors WHERE key = ?", (key,)).fetchone()) for key in keys]
            known = {key: np.frombuffer(row[0], dtype="<f4") for key, row in rows if row is not None}
        except (OSError, sqlite3.Error, ValueError) as error:
            logger.info("no vectors from %s: %s", self._file, error)
            return {}
        return {key: vector_D for key, vector_D in known.items() if vector_D.shape == (length,)}

    def _write(self, made: dict[bytes, NDArray[np.float32]]) -> None:
        rows = [(key, vector_D.astype("<f4").tobytes()) for key, vector_D in made.items()]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            make_private_file(self._file)
            with closing(self._open()) as database, database:
                database.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)
        except (OSError, sqlite3.Error) as error:
            logger.info("vectors are not stored in %s: %s", self._file, error)

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._file, timeout=BUSY_S)
        database.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID")
        return database
