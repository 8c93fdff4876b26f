"""The FAISS index alone."""

from pathlib import Path

import numpy as np
import pytest

from cacheblend.base.errors import RetrieverError
from cacheblend.retriever.index import VectorIndex


def vectors(count: int, dimensions: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, dimensions)).astype(np.float32)


def test_search_is_brute_force_l2() -> None:
    """Ids and distances are those of a numpy search, through adding and removing."""
    data = vectors(200)
    index = VectorIndex(16)
    index.add(range(0, 300, 3), data[:100])
    index.remove(range(0, 90, 3))
    index.add(range(300, 400), data[100:])
    ids = np.array([*range(90, 300, 3), *range(300, 400)])
    kept = np.concatenate([data[30:100], data[100:]])
    for query in vectors(5):
        found, distances = index.search(query + 0.1, 7)
        expected = ((kept - query - 0.1) ** 2).sum(axis=1)
        order = np.argsort(expected)[:7]
        assert found == ids[order].tolist()
        np.testing.assert_allclose(distances, expected[order], rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 5, 150, 200])
def test_equals_come_in_the_order_of_their_ids(top_k: int) -> None:
    """Among equal vectors the lowest ids are found, in order, also where not all of them fit."""
    index = VectorIndex(16)
    index.add(range(10, 210), np.repeat(vectors(1), 200, axis=0))
    assert index.search(vectors(1)[0] + 1, top_k)[0] == list(range(10, 10 + top_k))


def test_saved_index_is_the_same(tmp_path: Path) -> None:
    """A saved index finds the same, can be changed further, and leaves no other file."""
    index = VectorIndex(16)
    index.add(range(50), vectors(50))
    index.save(tmp_path / "index", generation=7)
    again, generation = VectorIndex.load(tmp_path / "index")
    assert (generation, len(again), again.dimensions) == (7, 50, 16)
    assert again.search(vectors(3)[2], 4) == index.search(vectors(3)[2], 4)
    again.remove([2])
    assert again.search(vectors(3)[2], 1)[0] != [2]
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file that is cut short anywhere, or has one bit turned, is not read."""
    path = tmp_path / "index"
    index = VectorIndex(4)
    index.add([1], vectors(1, 4))
    index.save(path, generation=1)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RetrieverError, match="damaged"):
            VectorIndex.load(path)
    for at in range(len(whole)):
        if 8 <= at < 16:
            continue  # the generation: another one is a stale file, which the catalog tells
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RetrieverError, match="damaged"):
            VectorIndex.load(path)
    path.unlink()
    with pytest.raises(RetrieverError, match="cannot be read"):
        VectorIndex.load(path)
