"""Three servers in processes of their own, on one PostgreSQL and one Redis; the third one is in another network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import CHUNK_TOKENS, DOCUMENTS
from postgres import PostgresServer
from remote_servers import SECRET, RedisServer
from server_process import MODEL, ServedConfig, ServerProcess, free_port
from waiting import wait_until

Replicas = list[httpx.Client]
WAIT_S = 20
pytestmark = pytest.mark.timeout(300)  # three servers start at once


@dataclass(frozen=True)
class Network:
    """Two addresses, the far one of a namespace of its own; else, where none may be made, of the loopback's.

    Args:
        near: where the servers that are shared listen.
        far: of the third replica.
        within: runs a command at the far end.
    """

    near: str
    far: str
    within: tuple[str, ...]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Made by `ip netns`, and taken away after the tests."""
    name, number = f"cacheblend-{os.getpid()}", os.getpid() % 250
    near, far, ends = f"10.211.{number}.1", f"10.211.{number}.2", (f"cbn{number}", f"cbf{number}")
    with ExitStack() as made:

        def ip(command: str) -> bool:
            return subprocess.run(["ip", *command.split()], capture_output=True, check=False).returncode == 0

        if shutil.which("ip") is None or not ip(f"netns add {name}"):
            yield Network("127.0.0.1", "127.0.0.2", ())  # no network is crossed
            return
        made.callback(ip, f"netns del {name}")  # its end of the pair, and so the other, goes with it
        steps = (
            f"link add {ends[0]} type veth peer name {ends[1]} netns {name}",
            f"addr add {near}/30 dev {ends[0]}",
            f"link set {ends[0]} up",
            f"-n {name} addr add {far}/30 dev {ends[1]}",
            f"-n {name} link set {ends[1]} up",
            f"-n {name} link set lo up",
        )
        if not all(map(ip, steps)):
            yield Network("127.0.0.1", "127.0.0.2", ())
            return
        yield Network(near, far, ("ip", "netns", "exec", name))


@pytest.fixture(scope="module")
def replicas(network: Network, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """A client of each."""
    pytest.importorskip("psycopg", reason="psycopg is not installed; pip install 'cacheblend[postgres]'")
    if PostgresServer.find("initdb") is None:
        pytest.skip("PostgreSQL is not installed; apt-get install postgresql")
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as opened:
        port = free_port()
        redis = RedisServer(folder, "--port", str(port), "--bind", network.near, "--protected-mode", "no")
        opened.callback(redis.kill)
        postgres = opened.enter_context(PostgresServer(network.near))
        database = postgres.new_database().split("?")[0].rpartition("/")[2]
        servers = [
            ServerProcess(
                ServedConfig(
                    model=str(model_dir),
                    store_dir=str(folder / f"store-{number}"),
                    host=host,
                    port=free_port(),
                    chunk_tokens=CHUNK_TOKENS,
                    index=postgres.url(database, network.near),
                    remote=f"redis://{network.near}:{port}/0",
                    remote_secret=SECRET,
                    guard_share=0.0,
                ),
                folder / f"log-{number}",
                within,
            )
            for number, (host, within) in enumerate((("127.0.0.1", ()), ("127.0.0.1", ()), (network.far, network.within)))
        ]  # they start side by side
        for server in servers:
            opened.enter_context(server)
        yield [opened.enter_context(httpx.Client(base_url=server.address, timeout=60)) for server in servers]


def upload(replica: httpx.Client, *documents: dict[str, object]) -> None:
    replica.post("/v1/documents", json={"documents": documents}).raise_for_status()


def answer(replica: httpx.Client, question: str, **body: object) -> Any:
    """An answer over one chunk."""
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        **({} if "documents" in body else {"num_chunks": 1}),
        "recompute_ratio": 0.15,
        "max_tokens": 4,
        "temperature": 0,
        "return_chunks": True,
        **body,
    }
    return replica.post("/v1/chat/completions", json=asked).raise_for_status().json()


def found(replica: httpx.Client, question: str, **body: object) -> tuple[str, str]:
    """The document that a question is answered from, and where its KV came from."""
    (chunk,) = answer(replica, question, **body)["cacheblend"]["chunks"]
    return chunk["document_id"], chunk["source"]


def metric(replica: httpx.Client, name: str) -> float:
    """The value of a metric, named with its labels as Prometheus writes them."""
    return float(next(line for line in replica.get("/metrics").text.splitlines() if line.startswith(f"{name} ")).split()[-1])


def stored(replica: httpx.Client) -> float:
    """Entries on a replica's disk."""
    return metric(replica, 'cacheblend_store_entries{tier="nvme"}')


def wait_until_sent(replica: httpx.Client) -> None:
    """Return when the remote tier has as many entries from this replica as its disk has; it has copied none."""
    wait_until(lambda: metric(replica, "cacheblend_remote_sent_total") >= stored(replica))


def words_of(replica: httpx.Client, id_: str) -> str:
    """The text of a document's first chunk, which no other document is nearer to."""
    text: str = replica.get(f"/v1/documents/{id_}").raise_for_status().json()["content"][0]["text"]
    return text


def ids(replica: httpx.Client) -> list[str]:
    return [document["id"] for document in replica.get("/v1/documents").raise_for_status().json()["data"]]


def test_ingested_at_one(replicas: Replicas) -> None:
    """A chunk that one server ingested is a hit of the remote tier at the others, across a network too, with one answer."""
    one, *others = replicas
    upload(one, *DOCUMENTS)
    wait_until_sent(one)
    question = words_of(one, "while")
    expected = answer(one, question)["choices"][0]["message"]
    for replica in others:
        assert ids(replica) == [document["id"] for document in DOCUMENTS]
        assert found(replica, question) == ("while", "remote")
        assert answer(replica, question)["choices"][0]["message"] == expected


def test_missed_at_one(replicas: Replicas) -> None:
    """A text that one server was given and missed is a hit at the one in the other network."""
    one, _, three = replicas
    brought = {"documents": [{"text": "Nobody has this."}]}
    before = stored(one)
    assert found(one, "What is it?", **brought)[1] == "computed"
    wait_until(lambda: stored(one) > before)
    wait_until_sent(one)
    assert found(three, "What is it?", **brought)[1] == "remote"


def test_deleted_at_one(replicas: Replicas) -> None:
    """What is deleted at one server no other lists, shows or finds from then on, and its KV leaves their disks."""
    _, two, three = replicas
    upload(two, {"id": "secret", "text": "The code of the safe is four two four two, says the note in the drawer."})
    question = words_of(three, "secret")

    def is_here(replica: httpx.Client) -> bool:
        return found(replica, question) in (("secret", "ram"), ("secret", "nvme"))

    for replica in replicas:
        wait_until(partial(is_here, replica))
    before = [stored(replica) for replica in replicas]
    three.delete("/v1/documents/secret").raise_for_status()
    for replica in replicas:
        assert replica.get("/v1/documents/secret").status_code == 404
        assert "secret" not in ids(replica)
    wait_until(lambda: all(stored(replica) < held for replica, held in zip(replicas, before, strict=True)))
    for replica in replicas:
        assert found(replica, question)[0] != "secret"
