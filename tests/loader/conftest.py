"""A tiny fusor, stores of both tiers, and the check that no test leaves a loader's thread behind."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prompts import chunk
from tiny_models import tiny_model
from waiting import loading, wait_until

sys.path.insert(0, str(Path(__file__).parent))

from spy_loader import SEEDS, TOKENS, key_of

from cacheblend.blend import Fusor
from cacheblend.store import ChunkKV, KVStore, StoreConfig


@pytest.fixture(scope="session")
def fusor() -> Fusor:
    return Fusor(tiny_model("llama"))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    wait_until(lambda: not loading())


@pytest.fixture(scope="module")
def stores(fusor: Fusor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, KVStore]]:
    """A store whose entries are read from RAM and one whose RAM holds none, with two chunks each."""
    with ExitStack() as stack:
        made = {}
        for tier, ram_bytes in (("ram", 2**24), ("nvme", 1)):
            config = StoreConfig(directory=tmp_path_factory.mktemp(tier), ram_budget_bytes=ram_bytes)
            made[tier] = stack.enter_context(KVStore(config))
            for seed in SEEDS[tier]:
                segment = chunk(fusor, TOKENS[seed], seed)
                assert isinstance(segment.kv, ChunkKV)
                made[tier].put(key_of(segment), segment.kv)
        yield made
