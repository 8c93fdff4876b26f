"""Slow networks: what flows is waited for, however long all of it takes; what is silent is not."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from remote_servers import OpenShared, RedisServer, remote_of, slow_link

from cacheblend.base.memory import Bytes
from cacheblend.store.remote.address import RemoteAddress
from cacheblend.store.remote.backend import BackendLimits, ObjectRange

TIMEOUT_S = 0.5
BYTES_PER_S = 4 * 2**20
OBJECT_BYTES = 4 * 2**20  # a second
OBJECT: Bytes = np.frombuffer(np.random.default_rng(0).bytes(OBJECT_BYTES), np.uint8)


@pytest.fixture
def slow_redis(redis_server: RedisServer) -> Iterator[str]:
    with slow_link(redis_server.socket, BYTES_PER_S) as port:
        yield f"redis://127.0.0.1:{port}/14"


@pytest.fixture(params=["redis", "s3"])
def slow_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A remote tier of each networked backend behind a slow link."""
    if request.param == "redis":
        yield request.getfixturevalue("slow_redis")
        return
    bucket: str = request.getfixturevalue("s3_bucket")
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with slow_link((str(server.hostname), int(server.port or 0)), BYTES_PER_S) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        yield f"{bucket}/{tmp_path.name}"


def test_what_flows_is_no_time_out(slow_url: str) -> None:
    """An object that takes longer than the time-out to carry is written, and read in ranges that share the network."""
    backend = RemoteAddress(slow_url).open(BackendLimits(timeout_s=TIMEOUT_S))
    backend.put("object", [OBJECT])
    reader = backend.reader()
    part = OBJECT_BYTES // 4
    reader.request([ObjectRange("object", at, at + part) for at in range(0, OBJECT_BYTES, part)])
    found = [reader.receive() for _ in range(4)]
    reader.close()
    backend.close()
    assert all(data is not None for data in found)
    assert np.array_equal(np.concatenate([data for data in found if data is not None]), OBJECT)


def test_many_headers_are_waited_for_as_one(slow_redis: str, open_shared: OpenShared) -> None:
    """A look-up of more entries than its patience has time for finds them, since one header comes after the other."""
    remote = remote_of(open_shared("a", slow_redis, remote_timeout_s=TIMEOUT_S))
    digests = [f"{number:064x}" for number in range(128)]
    header = OBJECT[: 16 * 1024]
    for digest in digests:
        remote.backend.put(remote.format.name(digest), [header])
    remote._lookup_s = 0.001  # as the look-ups before it were
    assert remote.open_all(digests) == {}  # headers of nothing, which came
    assert (remote.stats().failures, remote.stats().damaged) == (0, len(digests))
