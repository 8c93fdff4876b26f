"""Fixtures of every test, which has no network and leaves nothing in the user's folders, and of several folders' tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # as many workers as processors: one thread each, set before torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote_servers import RedisServer

from cacheblend.base.files import user_cache_folder

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
USERS_CACHE = user_cache_folder()
asyncio.set_event_loop(None)  # from here on none is made unasked: LlamaIndex would leave it open, and a later test be blamed
_DATA = tempfile.TemporaryDirectory(prefix="cacheblend-tests-")
os.environ["XDG_DATA_HOME"] = _DATA.name  # where a store is that nobody names


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # where digests of weights are remembered
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's cache folder is one of the test's own, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()


@pytest.fixture
def real_model() -> Callable[[str], Path]:
    """Gives the folder of a known model that the user has fetched, or skips."""
    from cacheblend.blend.models import find_model

    def folder(name: str) -> Path:
        found = USERS_CACHE / find_model(name).folder.relative_to(user_cache_folder())
        if not (found / "config.json").is_file():
            pytest.skip(f"{name} is not in {USERS_CACHE}; fetch it with `cacheblend model get {name}`")
        return found

    return folder
