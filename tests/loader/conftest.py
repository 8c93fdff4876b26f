"""A tiny fusor, and the check that no test leaves a loader's thread behind."""

from collections.abc import Iterator

import pytest
from tiny_models import tiny_model

from cacheblend.blend import Fusor
from cacheblend.loader.layer_loader import THREADS


@pytest.fixture(scope="session")
def fusor() -> Fusor:
    return Fusor(tiny_model("llama"))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not THREADS.busy
