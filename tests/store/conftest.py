"""`from chunks import ...` for the store's tests, and a store in a fresh folder."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cacheblend.store import KVStore, StoreConfig

sys.path.insert(0, str(Path(__file__).parent))

OpenStore = Callable[..., KVStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens a store in the test's folder; keywords go to `StoreConfig`. Closes what the test leaves open."""
    with ExitStack() as stack:

        def open_one(**options: object) -> KVStore:
            return stack.enter_context(KVStore(StoreConfig(**{"directory": tmp_path / "store", **options})))

        yield open_one
