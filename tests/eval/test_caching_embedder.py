"""Stored vectors: met texts are not embedded again, others' vectors are not taken, and a broken file is done without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fakes import FakeEmbedder
from numpy.typing import NDArray

from cacheblend.eval.data.caching_embedder import CachingEmbedder


class CountingEmbedder(FakeEmbedder):
    """Notes what it embeds."""

    def __init__(self, name: str = "fake", dimensions: int = 64) -> None:
        super().__init__(name, dimensions)
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        return super().encode(texts)


def test_each_text_is_embedded_once(tmp_path: Path) -> None:
    """The vectors are the embedder's own, in the texts' order; the file serves equal embedders only, by name and length."""
    first, second = CountingEmbedder(), CountingEmbedder()
    file = tmp_path / "new" / "vectors.sqlite"
    np.testing.assert_array_equal(CachingEmbedder(first, file).encode(["a b", "c", "a b"]), first.encode(["a b", "c", "a b"]))
    assert first.texts[:2] == ["a b", "c"]
    cached = CachingEmbedder(second, file)
    np.testing.assert_array_equal(cached.encode(["d", "c", "\ud800"]), FakeEmbedder().encode(["d", "c", "\ud800"]))
    assert second.texts == ["d", "\ud800"]
    assert cached.encode([]).shape == (0, 64)
    for other in (CountingEmbedder("other"), CountingEmbedder(dimensions=32)):
        assert CachingEmbedder(other, file).encode(["c"]).shape == (1, other.dimensions)
        assert other.texts == ["c"]


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    """Every text is embedded, and nothing fails."""
    (tmp_path / "broken").write_bytes(b"no database " * 100)
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "broken", tmp_path / "file" / "below.sqlite"):
        embedder = CountingEmbedder()
        for _ in range(2):
            np.testing.assert_array_equal(CachingEmbedder(embedder, file).encode(["a"]), FakeEmbedder().encode(["a"]))
        assert embedder.texts == ["a", "a"]
