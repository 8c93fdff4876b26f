"""`from chunks import ...` for the remote tier's tests, servers for a module, and stores that share one remote tier."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from remote_servers import OpenShared, RedisServer, s3_server

from cacheblend.store import KVStore, StoreConfig


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that is not hurt; empty it by another database."""
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer(tmp_path_factory.mktemp("r"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def open_shared(tmp_path: Path) -> Iterator[OpenShared]:
    """Opens a store of one replica, by name, on a remote tier; keywords go to `StoreConfig`. Closes what is left open."""
    with ExitStack() as stack:

        def open_one(replica: str, url: str, **options: object) -> KVStore:
            store = KVStore(StoreConfig(**{"directory": tmp_path / replica, "remote": url, **options}))  # type: ignore[arg-type]
            stack.callback(store.close)
            return store

        yield open_one


@pytest.fixture(params=["redis", "folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty remote tier of each backend."""
    if request.param == "folder":
        pytest.importorskip("obstore", reason="obstore is not installed; the extra [objects] brings it")
        return f"file://{tmp_path}/objects"
    if request.param == "s3":
        bucket: str = request.getfixturevalue("s3_bucket")
        return f"{bucket}/{tmp_path.name}"
    server: RedisServer = request.getfixturevalue("redis_server")
    numbers: Iterator[int] = _DATABASES
    return f"{server.url}?db={next(numbers)}"


_DATABASES = iter(range(1, 16))
