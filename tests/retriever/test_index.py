"""The FAISS index alone."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("num_chunks", [1, 5, 150, 200])
def test_equals_come_in_the_order_of_their_ids(num_chunks: int) -> None:
    """Among equal vectors the lowest ids are found, in order, also where not all of them fit."""
    index = VectorIndex(16)
    index.add(range(10, 210), np.repeat(vectors(1), 200, axis=0))
    assert index.search(vectors(1)[0] + 1, num_chunks)[0] == list(range(10, 10 + num_chunks))
